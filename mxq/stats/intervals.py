"""Intervals, simultaneous bands, and p-values from the draws of a bootstrap.

With the estimate e, its standard error s, and of each draw the pivot t = (e_draw - e) / s_draw, the interval is
bootstrap-t: from e - s * t[97.5 %] to e - s * t[2.5 %] (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
section 12.5). benchmarks/STATISTICS.md has how it and others cover.

A band holds a whole curve at once: at each position e -+ c * s, with c the 95 % quantile over draws of the largest |t|
of any position (sup-t; Montiel Olea and Plagborg-Moller, Journal of Applied Econometrics 34, 2019).

The p-value of "below b" is the share of draws with a pivot of at most (e - b) / s: it is 2.5 % exactly where the
interval's upper end is b. 2,000 draws say little about the last percent: there, Student's tail with n - 1 degrees of
freedom goes on, stretched to meet the draws at 1 %.
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
        """Return the one-sided p-value of the claim that the true value is below ``bound``."""
        return self._p(bound, -1)

    def p_above(self, bound: float) -> float:
        """Return the one-sided p-value of the claim that the true value is above ``bound``."""
        return self._p(bound, 1)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values; None for an end that there is not."""
        ends = {"lower": self.lower, "upper": self.upper}
        finite = {name: value if math.isfinite(value) else None for name, value in ends.items()}
        return {"estimate": self.estimate, **finite, "prompts": self.prompts}

    def _p(self, bound: float, side: int) -> float:
        if self.replicates is None:
            raise ValueError("this interval was made without draws")
        if not self.bounded:
            return 1.0
        if self.replicates.log and bound <= -1:
            return 0.0 if side > 0 else 1.0
        beyond = side * (float(self.replicates.estimates[0]) - (math.log1p(bound) if self.replicates.log else bound))
        error = float(self.replicates.errors[0])
        if error == 0:
            return 0.0 if beyond > 0 else 1.0
        # "Above" needs a large estimate: draws whose pivot is as large speak against it.
        return _Tail(side * self.replicates.pivots()[:, 0], self.prompts - 1).beyond(beyond / error)


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
        """Return what the band has at one position; its p-values are those of the whole curve's test."""
        return Interval(self.estimate[position], self.lower[position], self.upper[position], self.prompts)

    @property
    def bounded(self) -> bool:
        """Whether there is a band at all."""
        return all(map(math.isfinite, (*self.lower, *self.upper)))

    def p_below(self, bound: float) -> float:
        """Return the p-value of the claim that the true curve is below ``bound`` at some position.

        It is two-sided, as the band is: 5 % exactly where the upper end at some position is ``bound``.
        """
        return self._p(bound, -1)

    def p_above(self, bound: float) -> float:
        """Return the p-value of the claim that the true curve is above ``bound`` at some position."""
        return self._p(bound, 1)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values: a list over positions each."""
        positions = [self.at(position).as_json() for position in range(len(self.estimate))]
        return {name: [p[name] for p in positions] for name in ("estimate", "lower", "upper")} | {
            "prompts": self.prompts
        }

    def _p(self, bound: float, side: int) -> float:
        if not self.bounded:
            return 1.0
        beyond, errors = side * (self.replicates.estimates - bound), self.replicates.errors
        if (beyond[errors == 0] > 0).any():
            return 0.0
        if not (errors > 0).any():
            return 1.0
        largest = float((beyond[errors > 0] / errors[errors > 0]).max())
        return _Tail(_largest(self.replicates), self.prompts - 1, sides=2).beyond(largest)


class _Tail:
    """The upper tail of pivots: draws as far as they resolve it, Student's beyond; Student's alone without draws."""

    def __init__(self, draws: Array, df: int, sides: int = 1) -> None:
        self._draws, self._df, self._sides = np.sort(draws[np.isfinite(draws)]), df, sides
        student = -float(special.stdtrit(df, _RESOLVED / sides))
        self._stretch = 1.0
        if len(self._draws):
            self._edge = float(np.quantile(self._draws, 1 - _RESOLVED))
            self._stretch = max(self._edge / student, 0.1)

    def quantile(self, tail: float) -> float:
        """Return what pivots exceed with probability ``tail``."""
        if len(self._draws) and tail >= _RESOLVED:
            return float(np.quantile(self._draws, 1 - tail))
        return -float(special.stdtrit(self._df, tail / self._sides)) * self._stretch

    def beyond(self, value: float) -> float:
        """Return the probability of exceeding ``value``."""
        if len(self._draws) and value <= self._edge:
            # The inverse of numpy's quantile, linear between neighbours.
            return 1 - float(np.interp(value, self._draws, np.linspace(0, 1, len(self._draws))))
        return self._sides * float(special.stdtr(self._df, -value / self._stretch))


def _largest(drawn: Replicates) -> Array:
    """Return the largest |pivot| over positions that vary at all, for each draw."""
    return np.abs(drawn.pivots()[:, drawn.errors > 0]).max(axis=1)


def interval(
    drawn: Replicates, resampling: Resampling, within: tuple[float, float] = (-math.inf, math.inf)
) -> Interval:
    """Return the interval of a single quantity, cut to the values it can have."""
    estimate, error, df = float(drawn.estimates[0]), float(drawn.errors[0]), drawn.prompts - 1
    lower, upper = -math.inf, math.inf
    if drawn.prompts > 1 and error == 0:
        lower = upper = estimate
    elif drawn.prompts > 1:
        tail, pivots = (1 - resampling.confidence) / 2, drawn.pivots()[:, 0]
        lower = estimate - error * _Tail(pivots, df).quantile(tail)
        upper = estimate + error * _Tail(-pivots, df).quantile(tail)
    if drawn.log:
        estimate, lower, upper = (math.expm1(value) for value in (estimate, lower, upper))
        lower = lower if drawn.prompts > 1 else -math.inf
    if drawn.prompts > 1:
        lower, upper = (min(max(end, within[0]), within[1]) for end in (lower, upper))
    return Interval(estimate, lower, upper, drawn.prompts, drawn)


def band(drawn: Replicates, resampling: Resampling, within: tuple[float, float]) -> Band:
    """Return the simultaneous band of a curve, cut to the values it can have."""
    half = np.full_like(drawn.errors, math.inf)
    if drawn.prompts > 1:
        half = np.zeros_like(drawn.errors)
        if (drawn.errors > 0).any():
            tail = _Tail(_largest(drawn), drawn.prompts - 1, sides=2)
            half = tail.quantile(1 - resampling.confidence) * drawn.errors
    lower, upper = drawn.estimates - half, drawn.estimates + half
    if drawn.prompts > 1:
        lower, upper = lower.clip(*within), upper.clip(*within)
    return Band(_floats(drawn.estimates), _floats(lower), _floats(upper), drawn.prompts, drawn)


def _floats(values: Array) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
