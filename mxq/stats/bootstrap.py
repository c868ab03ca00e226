"""Bootstrap over conversations of ratios of sums: estimates, standard errors, and both again for every draw.

Passes of one answer resemble each other, and turns of a conversation do. So whole conversations are drawn, n of n with
replacement, each with all of its passes and in all arms. Every quantity here is made of ratios of sums over
conversations, r = sum(t_i) / sum(b_i): an acceptance length is tokens over passes, survival is surviving passes over
passes, a mean over requests is a sum over requests over their number. A comparison is a difference of two such ratios,
or of their logarithms, whose sums are drawn together.

Each draw also has its own standard error, by linearisation (the delta method for ratio estimators; Cochran, Sampling
Techniques, 1977, section 2.11 and chapter 6):

    var(g(r)) = g'(r)^2 * n / (n - 1) * sum(w_i * (t_i - r * b_i)^2) / sum(w_i * b_i)^2

with w_i for how often conversation i was drawn, and g for the scale. It needs nothing but sums of squares and products,
so that all draws of all positions are one product of matrices.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]

_LEAST_ERROR = 0.25

_MOST = 100_000
"""More resamples change no digit that is shown, and all of them are in memory at once."""


@dataclass(frozen=True)
class Resampling:
    """How intervals are made: number of draws, their seed, and the confidence of an interval or a whole band."""

    resamples: int = 2000
    seed: int = 0
    confidence: float = 0.95

    def __post_init__(self) -> None:
        """Raise ValueError for what gives no interval."""
        if not 200 <= self.resamples <= _MOST or not 0.5 <= self.confidence < 1:
            raise ValueError(f"intervals need 200 to {_MOST} resamples, and a confidence from 0.5 to below 1")


class Scale(NamedTuple):
    """On what scale a ratio is drawn (``of`` it, with its derivative ``slope``), and how the result is shown."""

    of: Callable[[Array], Array]
    slope: Callable[[Array], Array]
    shown: Callable[[Array], Array]
    hidden: Callable[[Array], Array]


LINEAR = Scale(np.positive, np.ones_like, np.positive, np.positive)

RELATIVE = Scale(np.log, np.reciprocal, np.expm1, np.log1p)
"""For two arms: the difference of logarithms, shown as new / base - 1."""

SHARE = Scale(special.logit, lambda share: 1 / (share * (1 - share)), special.expit, special.logit)
"""For one arm: the logit keeps an interval of a share within 0 and 1, longer on the side that has room."""


@dataclass(frozen=True, eq=False)
class Replicates:
    """Of P quantities over ``prompts`` conversations: estimates [P] and standard errors [P], and of R draws [R, P].

    All on the ``scale`` they were drawn on. R is 0 where nothing was drawn. Errors are 0 where conversations all agree.
    """

    prompts: int
    scale: Scale
    estimates: Array
    errors: Array
    drawn_estimates: Array
    drawn_errors: Array

    def deviations(self) -> Array:
        """Return for each draw the largest |estimate of the draw - estimate| / standard error of the draw, [R].

        Largest over the quantities that vary at all. A draw without anything of a quantity says nothing about it; NaN
        if it has nothing of any. Where few conversations have any of what is counted, some draws have errors near 0,
        which say nothing either: errors are taken as no less than a quarter of the sample's.
        """
        varying = self.errors > 0
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.fmax(self.drawn_errors[:, varying], _LEAST_ERROR * self.errors[varying])
            pivots = np.abs(self.drawn_estimates[:, varying] - self.estimates[varying]) / errors
        return np.fmax.reduce(np.where(np.isfinite(pivots), pivots, np.nan), axis=1, initial=np.nan)

    def only(self, position: int, prompts: int) -> "Replicates":
        """Return a single one of the quantities, which ``prompts`` conversations tell something of."""
        at = slice(position, position + 1)
        arrays = self.estimates[at], self.errors[at], self.drawn_estimates[:, at], self.drawn_errors[:, at]
        return Replicates(prompts, self.scale, *arrays)


def replicates(tops: Array, bottoms: Array, resampling: Resampling, scale: Scale = LINEAR) -> Replicates:
    """Draw ratios of sums, or the difference of the second and the first arm's.

    ``tops`` and ``bottoms``: [arms, conversations, P] with one arm or two, and with P of 1 where the quantities share
    it. Conversations that have nothing in them are left out.
    """
    there = (bottoms != 0).any(axis=(0, 2)) | (tops != 0).any(axis=(0, 2))
    tops, bottoms = np.broadcast_arrays(tops[:, there], bottoms[:, there])
    arms, prompts, quantities = tops.shape
    sums = [*tops, *bottoms]  # in this order: variables of the quadratic form below
    pairs = [(i, j) for i in range(len(sums)) for j in range(i, len(sums))]
    columns = np.concatenate([*sums, *(sums[i] * sums[j] for i, j in pairs)], axis=1)
    # The sample itself is the first row: every conversation once.
    totals = _weights(prompts, resampling.resamples, resampling.seed) @ columns
    totals = totals.reshape(len(totals), -1, quantities)
    top, bottom, squares = totals[:, :arms], totals[:, arms : 2 * arms], totals[:, 2 * arms :]
    sign = np.array([-1.0, 1.0])[-arms:, None]
    with np.errstate(divide="ignore", invalid="ignore"):  # where a draw has nothing, its numbers are not finite
        ratio = top / bottom
        factors = np.concatenate([1 / bottom, -ratio / bottom], axis=1) * np.tile(sign * scale.slope(ratio), (2, 1))
        terms = [factors[:, i] * factors[:, j] * squares[:, p] * (1 + (i != j)) for p, (i, j) in enumerate(pairs)]
        variance = np.sum(terms, axis=0)
        values = (sign * scale.of(ratio)).sum(axis=1)
        # Conversations that all agree have a variance of 0, of which rounding may leave anything around 0.
        variance[variance < 1e-12 * np.abs(terms).max(axis=0)] = 0.0
        errors = np.sqrt(variance * prompts / max(prompts - 1, 1))
    # A share of exactly 0 or 1 has no logit, and nothing varies.
    return Replicates(prompts, scale, values[0], np.nan_to_num(errors[0]), values[1:], errors[1:])


def mean_of_strata(strata: list[Replicates]) -> Replicates:
    """Return the mean of quantities of several workloads, each weighing alike and drawn by itself.

    Draws of equally many conversations are the same ones; a permutation for each workload makes them independent. One
    conversation tells nothing of others of its workload, and so nothing of the mean: ``prompts`` is then 1.
    """
    count = len(strata)
    estimates, variances = np.zeros_like(strata[0].drawn_estimates), np.zeros_like(strata[0].drawn_errors)
    for number, stratum in enumerate(strata):
        order = np.random.default_rng(number).permutation(len(estimates))
        estimates += stratum.drawn_estimates[order] / count
        variances += (stratum.drawn_errors[order] / count) ** 2
    return Replicates(
        sum(stratum.prompts for stratum in strata) if all(stratum.prompts > 1 for stratum in strata) else 1,
        strata[0].scale,
        np.mean([stratum.estimates for stratum in strata], axis=0),
        np.sqrt(np.sum([(stratum.errors / count) ** 2 for stratum in strata], axis=0)),
        estimates,
        np.sqrt(variances),
    )


@functools.lru_cache(maxsize=4)  # a comparison has many cells of one size
def _weights(prompts: int, resamples: int, seed: int) -> Array:
    """Return how often each conversation is drawn, [1 + resamples, prompts]; the first row is the sample."""
    drawn = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)
    return np.concatenate([np.ones((1, prompts)), drawn])
