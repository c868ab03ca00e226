"""Whether two measurements with the same prompts have the same acceptance length: a bootstrap over prompts.

Prompts differ far more from each other than two measurements of one prompt. So prompts are drawn again, each with the
passes of both measurements, and the difference of the pooled lengths is taken every time. With fewer than a dozen
prompts such an interval is too narrow: at 99.9 %, two measurements that do not differ would be told apart in one case
of forty with 8 prompts, one of ten with 4.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mxq.stats.acceptance import Passes

ENOUGH = 12
"""Prompts from which on an interval is worth looking at."""

_RESAMPLES = 10_000
_SEED = 0


@dataclass(frozen=True)
class Difference:
    """Pooled acceptance length of ``second`` minus that of ``first``, with its percentile interval."""

    prompts: int
    first: float
    second: float
    lower: float
    upper: float

    @property
    def is_none(self) -> bool:
        """Whether the interval has 0 in it."""
        return self.lower <= 0 <= self.upper


def acceptance_difference(
    first: Sequence[Passes], second: Sequence[Passes], confidence: float = 0.999
) -> Difference | None:
    """Compare the passes of the same prompts, in the same order; None if either has no passes at all.

    The same passes give the same interval: the draws are seeded. Raises ValueError for lists of different length.
    """
    counts = np.array(
        [
            (sum(a.accepted), len(a.accepted), sum(b.accepted), len(b.accepted))
            for a, b in zip(first, second, strict=True)
        ],
        dtype=np.float64,
    ).reshape(-1, 4)
    total = counts.sum(axis=0)
    if not total[1] or not total[3]:
        return None
    prompts = len(counts)
    draws = _weights(prompts) @ counts
    # A draw of nothing but prompts without passes says nothing.
    draws = draws[(draws[:, 1] > 0) & (draws[:, 3] > 0)]
    differences = draws[:, 2] / draws[:, 3] - draws[:, 0] / draws[:, 1]
    tail = (1 - confidence) / 2
    lower, upper = np.quantile(differences, [tail, 1 - tail])
    return Difference(
        prompts, float(1 + total[0] / total[1]), float(1 + total[2] / total[3]), float(lower), float(upper)
    )


@functools.lru_cache(maxsize=1)  # one workload after the other, with all of its arms
def _weights(prompts: int) -> NDArray[np.float64]:
    """Return how often each prompt is drawn, [resamples, prompts]."""
    drawn = np.random.default_rng(_SEED).multinomial(prompts, np.full(prompts, 1 / prompts), size=_RESAMPLES)
    return drawn.astype(np.float64)
