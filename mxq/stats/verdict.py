"""Verdicts by equivalence: is a change inside the margin, outside of it, or is that not known?

With an interval (or a simultaneous band) and a margin m:

* preserved: all of it inside -m to m. Both one-sided tests of the boundaries reject (TOST; Schuirmann, Journal of
  Pharmacokinetics and Biopharmaceutics 15, 1987), at 2.5 % each with a 95 % interval, where TOST usually takes 5 %.
* degraded: all of it below -m; a band: at some position.
* improved: all of it above m; a band: at some position, and at none does it reach below -m.
* undecided: else. That no significant difference was found is not a verdict.

Several rows: among 60 changes that are all at the margin, three would be called degraded or improved by chance. So
these two claims are tested together by Holm's procedure (Scandinavian Journal of Statistics 6, 1979), at 5 % for one
error or more in the family. That everything is preserved needs every row preserved, which is itself one test at its
level, not many.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mxq.stats.intervals import Band, Interval

ENOUGH = 12
"""Prompts from which on there are verdicts. Intervals hold the truth with fewer, too, if prompts are alike enough; but
a kind of prompt that is one in five is missing from every fourth set of six, and from every fifteenth of twelve."""

_MOST = 1_000_000
"""More prompts than that decide nothing that anybody measures."""


class Verdict(StrEnum):
    """What a comparison says of a change."""

    PRESERVED = "preserved"
    DEGRADED = "degraded"
    IMPROVED = "improved"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Margins:
    """Changes that do not matter: of acceptance length and throughput relative, of survival absolute."""

    acceptance: float = 0.03
    survival: float = 0.02
    throughput: float = 0.02

    def __post_init__(self) -> None:
        """Raise ValueError for a margin that is not between 0 and 1."""
        for name, margin in vars(self).items():
            if not 0 < margin < 1:
                raise ValueError(f"the margin of {name} is {margin}, which is not between 0 and 1")


@dataclass(frozen=True)
class Judged:
    """``verdict`` is the row's own, ``adjusted`` that among all rows; ``p`` and ``adjusted_p`` are of its claim.

    The claim is "degraded or improved", two-sided: p is at most 1 - confidence just where the interval is outside the
    margin. ``decides``: for a row that is undecided by itself, see :func:`prompts_to_decide`.
    """

    verdict: Verdict
    adjusted: Verdict
    p: float
    adjusted_p: float
    decides: int | None


def judge(change: Interval | Band, margin: float) -> Verdict:
    """Return the verdict of a change by itself. Over fewer than :data:`ENOUGH` prompts it is undecided."""
    if _too_few(change):
        return Verdict.UNDECIDED
    lowest, highest = min(_lower(change)), max(_upper(change))
    if -margin <= lowest and highest <= margin:
        return Verdict.PRESERVED
    if min(_upper(change)) < -margin:
        return Verdict.DEGRADED
    if max(_lower(change)) > margin and lowest >= -margin:
        return Verdict.IMPROVED
    return Verdict.UNDECIDED


def p_outside(change: Interval | Band, margin: float) -> float:
    """Return the two-sided p-value of the claim that the change is beyond the margin, to either side."""
    if _too_few(change):
        return 1.0
    return min(change.p_below(-margin), change.p_above(margin))


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Return Holm's adjusted p-values, in the order given: reject those of at most alpha."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return tuple(adjusted)


def judge_all(changes: Sequence[Interval | Band], margin: float, confidence: float = 0.95) -> list[Judged]:
    """Judge the rows of one quantity, each by itself and together: claims that Holm does not uphold are undecided.

    ``confidence`` is that of the intervals.
    """
    alone = [judge(change, margin) for change in changes]
    p_values = [p_outside(change, margin) for change in changes]
    judged = []
    for change, verdict, p, adjusted_p in zip(changes, alone, p_values, holm(p_values), strict=True):
        upheld = verdict is Verdict.PRESERVED or adjusted_p <= 1 - confidence
        adjusted = verdict if upheld else Verdict.UNDECIDED
        decides = prompts_to_decide(change, margin) if verdict is Verdict.UNDECIDED else None
        judged.append(Judged(verdict, adjusted, p, adjusted_p, decides))
    return judged


def prompts_to_decide(change: Interval | Band, margin: float) -> int | None:
    """Return how many prompts would decide, if estimates stay and intervals shrink with the square root of prompts.

    Estimates do not stay: with so many prompts the chance of a verdict is about one half. None where no number of
    prompts would (an estimate at the margin, no interval), or only more than a million.
    """
    if not change.bounded:
        return None
    rows = list(zip(_estimates(change), _lower(change), _upper(change), strict=True))
    below = [(upper - e) / (-margin - e) for e, _, upper in rows if e < -margin]
    above = [(e - lower) / (e - margin) for e, lower, _ in rows if e > margin]
    not_below = [_over(e - lower, margin + e) for e, lower, _ in rows]
    not_above = [_over(upper - e, margin - e) for e, _, upper in rows]
    if below:
        needed = min(below)
    elif above:
        needed = max(min(above), *not_below)
    else:
        needed = max(*not_below, *not_above)
    prompts = change.prompts * needed**2
    return max(ENOUGH, math.ceil(prompts - 1e-6)) if prompts <= _MOST else None


def _over(half: float, room: float) -> float:
    """Return by which factor half an interval must shrink to fit."""
    return half / room if room > 0 else 0.0 if half == 0 else math.inf


def _too_few(change: Interval | Band) -> bool:
    """Whether so few prompts were drawn that the verdict must wait; repeats are few, and their interval knows it."""
    drawn = change.replicates
    return not change.bounded or (drawn is not None and len(drawn.drawn_errors) > 0 and change.prompts < ENOUGH)


def _estimates(change: Interval | Band) -> tuple[float, ...]:
    return change.estimate if isinstance(change, Band) else (change.estimate,)


def _lower(change: Interval | Band) -> tuple[float, ...]:
    return change.lower if isinstance(change, Band) else (change.lower,)


def _upper(change: Interval | Band) -> tuple[float, ...]:
    return change.upper if isinstance(change, Band) else (change.upper,)
