"""Statistics of speculative decoding from per-pass counts: no engine, no files, plain numbers in and out."""

from mxq.stats.acceptance import Acceptance, Passes, acceptance, counted_acceptance
from mxq.stats.identity import Identity, identity
from mxq.stats.latency import Latencies, Percentiles, latencies
from mxq.stats.paired import Difference, acceptance_difference
from mxq.stats.repeats import Repeated, repeated
from mxq.stats.throughput import Span, Throughput, decode_tokens_per_s, throughput

__all__ = [
    "Acceptance",
    "Difference",
    "Identity",
    "Latencies",
    "Passes",
    "Percentiles",
    "Repeated",
    "Span",
    "Throughput",
    "acceptance",
    "acceptance_difference",
    "counted_acceptance",
    "decode_tokens_per_s",
    "identity",
    "latencies",
    "repeated",
    "throughput",
]
