"""The changes that two sides' cells allow, each with its interval, and the cells that allow none, each with why."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mxq.analysis import evidence
from mxq.analysis.pairs import Pair
from mxq.analysis.speed import DAMAGED, EMULATED, UNKNOWN, rate, withheld
from mxq.analysis.summary import counted as by_counters
from mxq.evaluate import RecordedCell
from mxq.stats import (
    Band,
    Counts,
    Interval,
    Resampling,
    acceptance_change,
    acceptance_intervals,
    all_alike,
    band_all_alike,
    over_repeats,
    repeats_change,
    survival_all_alike,
    throughput_change,
    throughput_interval,
)

Quantity = Literal["acceptance length", "survival", "tokens per second"]
ACCEPTANCE: Quantity = "acceptance length"
SURVIVAL: Quantity = "survival"
SPEED: Quantity = "tokens per second"

NO_PARTNER = "no partner"
ONE_PROMPT = "one prompt tells nothing about others: no interval"
MEASURED_ONCE = (
    "Each arm was measured once, by a server of its own: what changed from one start to the next is in no interval"
)
TAKE_TURNS = "--repeats 3 has arms take turns."
ONE_REPEAT = "one repeat: no interval with several in flight; measure with --repeats 3 or more"
COUNTERS = "passes of single answers are not known, only sums: no interval"
NO_PASS = "no verify pass"
NO_DRAFT = "no draft was accepted on either side: there is no acceptance to preserve"
NO_REPEAT = "no repeat that both sides have"


@dataclass(frozen=True)
class Change:
    """One change, not yet judged: fields as in :class:`mxq.analysis.rows.Row`; for survival whole bands."""

    quantity: Quantity
    configuration: str
    workload: str | None
    concurrency: int
    prompts: int
    repeats: int
    base: Interval | Band
    new: Interval | Band
    change: Interval | Band


@dataclass(frozen=True)
class Missing:
    """A cell that gives no row, and why; ``base`` and ``new`` are point estimates where there are any."""

    quantity: Quantity | None
    configuration: str
    workload: str
    concurrency: int
    why: str
    base: float | None = None
    new: float | None = None

    @property
    def where(self) -> str:
        """Return which cell it is, in words."""
        what = f"{self.quantity} of " if self.quantity else ""
        return f"{what}{self.configuration} on {self.workload}, {self.concurrency} in flight"

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return vars(self)


Found = list[Change | Missing]


def of_pairs(found: Sequence[Pair], resampling: Resampling, *, apart: str | None) -> tuple[Found, list[str]]:
    """Return changes, and cells without, by quantity and configuration; and notes for the reader.

    ``apart``: why speeds of the two sides must not be compared, if there is a reason.
    """
    made: Found = []
    for group in _groups(_lowest(found), lambda pair: pair.configuration):
        made += _acceptance(group, resampling)
    made.sort(key=lambda one: one.quantity == SURVIVAL)  # stable: all lengths, then all curves
    if apart:
        return made, [f"Tokens per second are not compared: {apart} differ, and a change would not be the target's."]
    reasons = {reason for pair in found for reason in _reasons(pair)}
    for group in _groups(found, lambda pair: (pair.configuration, pair.concurrency)):
        made += _speed(group, resampling)
    return made, [_NOT_COMPARED[reason] for reason in _NOT_COMPARED if reason in reasons]


_NOT_COMPARED = {
    EMULATED: "Tokens per second are not compared: MXFP4 is emulated here, which says nothing about MXFP4 kernels.",
    UNKNOWN: "Tokens per second are not compared: no log names the kernels of the MXFP4 target, which may be emulated.",
}


def _lowest(found: Iterable[Pair]) -> list[Pair]:
    """Return the pairs that acceptance is compared in: the speculative ones with the fewest requests in flight."""
    lowest: dict[tuple[str, str], Pair] = {}
    for pair in found:
        known = lowest.get((pair.configuration, pair.workload))
        if pair.configuration != "ar" and (known is None or pair.concurrency < known.concurrency):
            lowest[pair.configuration, pair.workload] = pair
    return list(lowest.values())


def _groups(found: Iterable[Pair], key: Callable[[Pair], Any]) -> list[list[Pair]]:
    groups: dict[Any, list[Pair]] = {}
    for pair in found:
        groups.setdefault(key(pair), []).append(pair)
    return list(groups.values())


def _acceptance(group: Sequence[Pair], resampling: Resampling) -> Found:
    """Return the changes of acceptance length and survival of one configuration, by workload and of all."""
    made: Found = []
    lengths: list[Change] = []
    curves: list[Change] = []
    counted: list[tuple[Counts, Counts]] = []
    for pair in group:
        cells = pair.first
        mine, its = (evidence.counts(cell) for cell in cells)
        if mine is None or its is None:
            made.append(_missing(ACCEPTANCE, pair, COUNTERS, *map(_counted, cells)))
            continue
        change = acceptance_change(mine, its, resampling)
        base, new = acceptance_intervals(mine, resampling), acceptance_intervals(its, resampling)
        if change is None or base is None or new is None:
            made.append(_missing(ACCEPTANCE, pair, NO_PASS))
            continue
        if not (mine.accepted.any() or its.accepted.any()):
            made.append(_missing(ACCEPTANCE, pair, NO_DRAFT, 1.0, 1.0))
            continue
        if not change.pooled.bounded:
            made.append(_missing(ACCEPTANCE, pair, ONE_PROMPT, base.pooled.estimate, new.pooled.estimate))
            continue
        lengths.append(_change(ACCEPTANCE, pair, base.pooled, new.pooled, change.pooled))
        curves.append(_change(SURVIVAL, pair, base.survival, new.survival, change.survival))
        counted.append((mine, its))
    if len(lengths) > 1:
        mean = all_alike([_interval(one.change) for one in lengths], resampling)
        lengths.append(_of_all(lengths, mean))
        curves.append(_all_curves(curves, counted, resampling))
    return [*lengths, *curves, *made]


def _all_curves(curves: Sequence[Change], counted: Sequence[tuple[Counts, Counts]], resampling: Resampling) -> Change:
    base, new = (survival_all_alike([arms[side] for arms in counted], resampling) for side in (0, 1))
    change = band_all_alike([one.change for one in curves if isinstance(one.change, Band)], resampling)
    prompts = sum(one.prompts for one in curves)
    return replace(curves[0], workload=None, prompts=prompts, base=base, new=new, change=change)


def _speed(group: Sequence[Pair], resampling: Resampling) -> Found:
    """Return the changes of tokens per second of one configuration at one concurrency, by workload and of all."""
    made: Found = []
    found: list[Change] = []
    kept: list[Pair] = []
    for pair in group:
        reasons = _reasons(pair)
        if DAMAGED in reasons:
            made.append(_missing(SPEED, pair, "records are damaged, and the wall clock is that of all requests"))
        elif not reasons and not pair.repeats:
            made.append(_missing(SPEED, pair, NO_REPEAT))
        if reasons or not pair.repeats:
            continue
        row = _one_at_a_time(pair, resampling) if pair.concurrency == 1 else _side_by_side([pair], resampling)
        if not _interval(row.change).bounded:
            why = ONE_PROMPT if pair.concurrency == 1 else ONE_REPEAT
            made.append(_missing(SPEED, pair, why, _interval(row.base).estimate, _interval(row.new).estimate))
            continue
        found.append(row)
        kept.append(pair)
    if len(found) > 1 and found[0].concurrency == 1:
        found.append(_of_all(found, all_alike([_interval(one.change) for one in found], resampling)))
    elif len(found) > 1 and len(_repeats(kept)) > 1:
        found.append(replace(_side_by_side(kept, resampling), prompts=sum(one.prompts for one in found)))
    return [*found, *made]


def _one_at_a_time(pair: Pair, resampling: Resampling) -> Change:
    base, new = (evidence.times(side[repeat] for repeat in pair.repeats) for side in (pair.base, pair.new))
    arms = (throughput_interval(base, resampling), throughput_interval(new, resampling))
    return _change(SPEED, pair, *arms, throughput_change(base, new, resampling))


def _side_by_side(several: Sequence[Pair], resampling: Resampling) -> Change:
    """Return the change over repeats, of one workload or of the geometric mean of several within each repeat."""
    repeats = _repeats(several)
    rates = [
        [_geometric([rate(pair_side[repeat]) for pair_side in sides]) for repeat in repeats]
        for sides in ([pair.base for pair in several], [pair.new for pair in several])
    ]
    arms = (over_repeats(rates[0], resampling), over_repeats(rates[1], resampling))
    row = _change(SPEED, several[0], *arms, repeats_change(rates[0], rates[1], resampling))
    return row if len(several) == 1 else replace(row, workload=None, repeats=len(repeats))


def _repeats(several: Sequence[Pair]) -> list[int]:
    """Return the repeats that all of these have on both sides."""
    return sorted(set.intersection(*(set(pair.repeats) for pair in several)))


def _reasons(pair: Pair) -> set[str]:
    """Return why the speeds of a pair are not shown, if so."""
    sides = ((pair.base, pair.base_run), (pair.new, pair.new_run))
    return {why for side, run in sides if (why := withheld(run, side)) is not None}


def _change(
    quantity: Quantity, pair: Pair, base: Interval | Band, new: Interval | Band, change: Interval | Band
) -> Change:
    prompts = len(set(evidence.names(pair.first[0])))
    place = (pair.configuration, pair.workload, pair.concurrency)
    repeats = len(pair.repeats) if quantity == SPEED else 1
    return Change(quantity, *place, prompts, repeats, base, new, change)


def _missing(quantity: Quantity, pair: Pair, why: str, base: float | None = None, new: float | None = None) -> Missing:
    return Missing(quantity, pair.configuration, pair.workload, pair.concurrency, why, base, new)


def _of_all(rows: Sequence[Change], mean: Interval) -> Change:
    """Return the row of all workloads; lengths or speeds of both sides are geometric means, as the change is."""
    prompts = sum(row.prompts for row in rows)
    base, new = (
        Interval(_geometric([_interval(side).estimate for side in sides]), -math.inf, math.inf, prompts)
        for sides in ([row.base for row in rows], [row.new for row in rows])
    )
    repeats = min(row.repeats for row in rows)
    return replace(rows[0], workload=None, prompts=prompts, repeats=repeats, base=base, new=new, change=mean)


def _counted(cell: RecordedCell) -> float | None:
    """Return the pooled length by the server's counters."""
    known = by_counters(cell)
    return known.pooled if known else None


def _interval(found: Interval | Band) -> Interval:
    assert isinstance(found, Interval)
    return found


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
