"""Statistics of speculative decoding from per-pass counts: no engine, no files, plain numbers in and out."""

from mxq.stats.acceptance import Acceptance, Passes, acceptance
from mxq.stats.identity import Identity, identity
from mxq.stats.throughput import Throughput, throughput

__all__ = ["Acceptance", "Identity", "Passes", "Throughput", "acceptance", "identity", "throughput"]
