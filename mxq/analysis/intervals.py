"""The intervals of every cell of a run over prompts like its own, as :mod:`mxq.stats` makes them.

Acceptance is that of a cell's first repeat, as in :mod:`mxq.analysis.summary`. Speeds have an interval over prompts
where one request is in flight; requests side by side are not independent of each other, and repeats tell instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mxq.analysis import evidence
from mxq.analysis.common import Cells, cut
from mxq.analysis.summary import CellSummary
from mxq.evaluate import Arm, Run
from mxq.stats import (
    Band,
    Interval,
    Resampling,
    Timed,
    acceptance_intervals,
    throughput_change,
    throughput_interval,
)


@dataclass(frozen=True)
class CellIntervals:
    """Of one cell; None for what has no interval over prompts.

    ``pooled``, ``per_request_mean``, ``survival`` and ``conditional`` are those of
    :class:`mxq.stats.AcceptanceIntervals`. ``tokens_per_s``: output tokens over the time that requests took, of all
    repeats. ``speedup``: the same over that of plain decoding by the same target, paired by prompt.
    """

    pooled: Interval | None = None
    per_request_mean: Interval | None = None
    survival: Band | None = None
    conditional: tuple[Interval | None, ...] | None = None
    tokens_per_s: Interval | None = None
    speedup: Interval | None = None


@dataclass(frozen=True)
class Intervals:
    """Those of a run, by arm, workload and concurrency; false where none were made."""

    cells: Mapping[tuple[Arm, str, int], CellIntervals] = field(default_factory=dict)
    confidence: float = 0.95

    @property
    def percent(self) -> str:
        """Return the confidence in words."""
        return f"{100 * self.confidence:g} %"

    def of(self, cell: CellSummary) -> CellIntervals:
        """Return those of a cell."""
        return self.cells.get((cell.arm, cell.workload, cell.concurrency), CellIntervals())

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.cells)


NOTHING = Intervals()


def intervals(run: Run, resampling: Resampling | None = None) -> Intervals:
    """Return the intervals of all cells of a run; raises MxqError when no prompt has been answered by all arms yet."""
    how = resampling or Resampling()
    cells, _ = cut(run)
    times = {place: evidence.times(repeats.values()) for place, repeats in cells.items() if place[2] == 1}
    return Intervals({place: _of_cell(place, cells, times, how) for place in cells}, how.confidence)


def _of_cell(
    place: tuple[Arm, str, int], cells: Cells, times: Mapping[tuple[Arm, str, int], Timed], how: Resampling
) -> CellIntervals:
    arm, workload, concurrency = place
    first = next(iter(cells[place].values()))
    made = CellIntervals()
    counted = evidence.counts(first) if arm.method != "ar" else None
    if counted and (accepted := acceptance_intervals(counted, how)):
        made = CellIntervals(
            pooled=accepted.pooled,
            per_request_mean=accepted.per_request_mean,
            survival=accepted.survival,
            conditional=accepted.conditional,
        )
    if place not in times:
        return made
    made = replace(made, tokens_per_s=throughput_interval(times[place], how))
    plain = times.get((Arm(arm.target, "ar"), workload, concurrency))
    if plain is None or arm.method == "ar":
        return made
    return replace(made, speedup=_ratio(throughput_change(plain, times[place], how)))


def _ratio(change: Interval) -> Interval:
    """Return a relative change as the ratio of new to base."""
    return Interval(1 + change.estimate, 1 + change.lower, 1 + change.upper, change.prompts)
