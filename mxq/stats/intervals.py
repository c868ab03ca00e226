"""Intervals, simultaneous bands, and p-values from the draws of a bootstrap.

With the estimate e, its standard error s, and |t| = |e_draw - e| / s_draw of each draw, an interval is e -+ c * s and c
the 95 % quantile of |t|: the symmetric bootstrap-t (Hall, Journal of the Royal Statistical Society B 50, 1988). A
curve's band is the same at every position, with c the quantile of the largest |t| of any position, so that it holds
all of the curve at once (sup-t; Montiel Olea and Plagborg-Moller, Journal of Applied Econometrics 34, 2019).
benchmarks/STATISTICS.md has how often these hold the truth, and how often others would.

The p-value of "below b" is the share of draws with |t| of at least (b - e) / s: it is 5 % just where the upper end of
the interval is b. 2,000 draws say little about the last percent: there, Student's tail with n - 1 degrees of freedom
goes on, stretched to meet the draws at 1 %.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import special

from mxq.stats.bootstrap import Array, Replicates, Resampling

_RESOLVED = 0.01
"""Smaller tails are Student's."""


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its interval, over ``prompts`` conversations (or over repeats).

    One prompt tells nothing about others: its interval reaches from minus to plus infinity (``bounded`` is false, JSON
    has null). An interval of width 0 (``constant``) says that these prompts all agree, not that all prompts would.
    """

    estimate: float
    lower: float
    upper: float
    prompts: int
    replicates: Replicates | None = field(default=None, repr=False, compare=False)

    @property
    def bounded(self) -> bool:
        """Whether there is an interval at all."""
        return math.isfinite(self.lower) and math.isfinite(self.upper)

    @property
    def constant(self) -> bool:
        """Whether it has a width of 0: every prompt gave the same."""
        return self.lower == self.upper

    def holds(self, value: float) -> bool:
        """Whether ``value`` is in the interval."""
        return self.lower <= value <= self.upper

    def p_below(self, bound: float) -> float:
        """Return the p-value of the claim that the true value is below ``bound``.

        It is two-sided, as the interval is: 5 % just where the upper end is ``bound``. Raises ValueError for what
        :meth:`Band.at` gives: a position has no test by itself.
        """
        return _p(self._drawn, bound, -1)

    def p_above(self, bound: float) -> float:
        """Return the p-value of the claim that the true value is above ``bound``; as for :meth:`p_below`."""
        return _p(self._drawn, bound, 1)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values; None for an end that there is not."""
        ends = {"lower": self.lower, "upper": self.upper}
        finite = {name: value if math.isfinite(value) else None for name, value in ends.items()}
        return {"estimate": self.estimate, **finite, "prompts": self.prompts}

    @property
    def _drawn(self) -> Replicates:
        if self.replicates is None:
            raise ValueError("this interval was made without draws")
        return self.replicates


@dataclass(frozen=True)
class Band:
    """A curve over draft positions with a band that holds all of the true curve at once, 95 times in 100.

    ``prompts`` and unbounded ends as in :class:`Interval`.
    """

    estimate: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    prompts: int
    replicates: Replicates = field(repr=False, compare=False)

    def at(self, position: int) -> Interval:
        """Return what the band has at one position, from 0."""
        return Interval(self.estimate[position], self.lower[position], self.upper[position], self.prompts)

    @property
    def bounded(self) -> bool:
        """Whether there is a band at all."""
        return all(map(math.isfinite, (*self.lower, *self.upper)))

    def holds(self, curve: tuple[float, ...]) -> bool:
        """Whether all of ``curve`` is in the band."""
        return all(self.at(position).holds(value) for position, value in enumerate(curve))

    def p_below(self, bound: float) -> float:
        """Return the p-value of the claim that the true curve is below ``bound`` at some position.

        It is 5 % just where the lowest upper end is ``bound``.
        """
        return _p(self.replicates, bound, -1)

    def p_above(self, bound: float) -> float:
        """Return the p-value of the claim that the true curve is above ``bound`` at some position."""
        return _p(self.replicates, bound, 1)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values: a list over positions each."""
        positions = [self.at(position).as_json() for position in range(len(self.estimate))]
        lists = {name: [p[name] for p in positions] for name in ("estimate", "lower", "upper")}
        return lists | {"prompts": self.prompts}


class _Deviations:
    """How large |t| is by chance: draws as far as they resolve it, Student's tail beyond; that alone without draws."""

    def __init__(self, drawn: Replicates) -> None:
        self._df, self._stretch, self._edge = drawn.prompts - 1, 1.0, 0.0
        deviations = drawn.deviations()
        self._draws = np.sort(deviations[np.isfinite(deviations)])
        if len(self._draws):
            self._edge = float(np.quantile(self._draws, 1 - _RESOLVED))
            self._stretch = self._edge / -float(special.stdtrit(self._df, _RESOLVED / 2))

    def quantile(self, tail: float) -> float:
        """Return what |t| exceeds with probability ``tail``."""
        if len(self._draws) and tail >= _RESOLVED:
            return float(np.quantile(self._draws, 1 - tail))
        return -float(special.stdtrit(self._df, tail / 2)) * self._stretch

    def beyond(self, value: float) -> float:
        """Return the probability of |t| above ``value``."""
        if value <= self._edge:
            # The inverse of numpy's quantile, linear between neighbours.
            return 1 - float(np.interp(value, self._draws, np.linspace(0, 1, len(self._draws))))
        return 2 * float(special.stdtr(self._df, -value / self._stretch))


def _p(drawn: Replicates, bound: float, side: int) -> float:
    """Return the p-value of the claim that some quantity lies beyond ``bound``, to the side -1 or 1."""
    if drawn.prompts < 2:
        return 1.0
    with np.errstate(divide="ignore"):
        beyond = side * (drawn.estimates - drawn.scale.hidden(np.full_like(drawn.estimates, bound)))
    if (beyond[drawn.errors == 0] > 0).any():
        return 0.0
    varying = drawn.errors > 0
    largest = float(np.max(beyond[varying] / drawn.errors[varying], initial=0.0))
    return _Deviations(drawn).beyond(largest) if largest > 0 else 1.0


def interval(
    drawn: Replicates, resampling: Resampling, within: tuple[float, float] = (-math.inf, math.inf)
) -> Interval:
    """Return the interval of a single quantity, cut to the values it can have."""
    made = band(drawn, resampling, within)
    return Interval(made.estimate[0], made.lower[0], made.upper[0], made.prompts, drawn)


def band(drawn: Replicates, resampling: Resampling, within: tuple[float, float]) -> Band:
    """Return the simultaneous band of a curve, cut to the values it can have."""
    half = np.zeros_like(drawn.errors)
    if (drawn.errors > 0).any() and drawn.prompts > 1:
        half = _Deviations(drawn).quantile(1 - resampling.confidence) * drawn.errors
    estimate, lower, upper = map(drawn.scale.shown, (drawn.estimates, drawn.estimates - half, drawn.estimates + half))
    ends = _floats(lower.clip(*within)), _floats(upper.clip(*within))
    if drawn.prompts < 2:
        ends = (-math.inf,) * len(half), (math.inf,) * len(half)
    return Band(_floats(estimate), *ends, drawn.prompts, drawn)


def _floats(values: Array) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
