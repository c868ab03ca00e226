"""Latencies as ``vllm bench serve`` defines them (vllm/benchmarks/serve.py, calculate_metrics).

* TTFT: from sending a request to the first piece of its answer.
* TPOT: from the first to the last piece, over output tokens - 1; of each request with more than one token.
* ITL: the time between two pieces, all of all requests together. With speculative decoding a piece is what a verify
  pass committed, so that ITL is the time of a pass, and only TPOT that of a token.

Percentiles are numpy's, linear between neighbours.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Percentiles:
    """Of one latency, in seconds; ``count`` is of requests for TTFT and TPOT, of pieces for ITL."""

    count: int
    mean_s: float
    median_s: float
    p99_s: float


@dataclass(frozen=True)
class Latencies:
    """``tpot`` and ``itl`` are None where no answer had a second token, or a second piece."""

    ttft: Percentiles
    tpot: Percentiles | None
    itl: Percentiles | None


def latencies(arrivals_s: Sequence[Sequence[float]], output_tokens: Sequence[int]) -> Latencies:
    """Summarise when the pieces of each answer came, in seconds since its request was sent.

    Raises ValueError without requests, for lists of different length, or an answer without pieces.
    """
    if not arrivals_s or len(arrivals_s) != len(output_tokens) or not all(len(at) for at in arrivals_s):
        raise ValueError("latencies need the pieces of every answer, and at least one answer")
    ttft = _percentiles(at[0] for at in arrivals_s)
    assert ttft is not None
    several = [(at, count) for at, count in zip(arrivals_s, output_tokens, strict=True) if count > 1]
    return Latencies(
        ttft=ttft,
        tpot=_percentiles((at[-1] - at[0]) / (count - 1) for at, count in several),
        itl=_percentiles(b - a for at in arrivals_s for a, b in itertools.pairwise(at)),
    )


def _percentiles(values: Iterable[float]) -> Percentiles | None:
    seconds = np.fromiter(values, dtype=np.float64)
    if not len(seconds):
        return None
    median, p99 = np.percentile(seconds, [50, 99])
    return Percentiles(len(seconds), float(seconds.mean()), float(median), float(p99))
