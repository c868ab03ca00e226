"""Output tokens per second of wall clock, prefill included: the definition of the published tables."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Throughput:
    """``tokens_per_s`` = all output tokens / all wall clock; the quartiles are over single requests' own rates."""

    output_tokens: int
    wall_s: float
    tokens_per_s: float
    lower_quartile: float
    upper_quartile: float


def throughput(output_tokens: Sequence[int], durations_s: Sequence[float]) -> Throughput:
    """Summarise requests that ran one after another, so that the wall clock is the sum of their durations.

    Raises ValueError without requests, for lists of different length, or a duration that is not positive.
    """
    tokens = np.asarray(output_tokens, dtype=np.int64)
    seconds = np.asarray(durations_s, dtype=np.float64)
    if not len(tokens) or len(tokens) != len(seconds) or not np.all(seconds > 0):
        raise ValueError("throughput needs one positive duration per request, and at least one request")
    quartiles = np.quantile(tokens / seconds, [0.25, 0.75])
    return Throughput(
        output_tokens=int(tokens.sum()),
        wall_s=float(seconds.sum()),
        tokens_per_s=float(tokens.sum() / seconds.sum()),
        lower_quartile=float(quartiles[0]),
        upper_quartile=float(quartiles[1]),
    )
