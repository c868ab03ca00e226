"""Which cells of two arms belong together: same method and budget, same workload, as many requests in flight."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mxq.analysis.common import cut
from mxq.analysis.speed import Repeats
from mxq.errors import UsageError
from mxq.evaluate import RecordedCell, Run

Key = tuple[str, str, int]
"""Configuration, workload, concurrency."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison: the arms of one target in a run."""

    run: Run
    target: str
    cells: Mapping[Key, Repeats]


@dataclass(frozen=True)
class Pair:
    """A cell of each side, cut to the same prompts in the same order, by repeat."""

    configuration: str
    workload: str
    concurrency: int
    base: Repeats
    new: Repeats
    base_run: Run
    new_run: Run

    @property
    def first(self) -> tuple[RecordedCell, RecordedCell]:
        """Return the first repeats: all that acceptance is taken from."""
        return self.base[min(self.base)], self.new[min(self.new)]

    @property
    def repeats(self) -> tuple[int, ...]:
        """Return the repeats that both sides have."""
        return tuple(sorted(self.base.keys() & self.new.keys()))


def check_workloads(run: Run, workloads: Collection[str]) -> None:
    """Raise UsageError for a workload that a run does not have."""
    if unknown := sorted(set(workloads) - set(run.prompts)):
        raise UsageError(f"{run.name} has no workload {', '.join(unknown)}", f"it has {', '.join(run.prompts)}")


def side(run: Run, target: str, workloads: Collection[str]) -> Side:
    """Return the arms of a target, on ``workloads`` or on all where none is given; raises UsageError without any."""
    check_workloads(run, workloads)
    there = dict.fromkeys(arm.target for arm in run.arms)
    if target not in there:
        raise UsageError(
            f"{run.name} has no arm of {target}, only of {', '.join(there)}",
            "choose with --base and --new, give a second run directory, or measure it: mxq eval --bf16 ... --mxfp4 ...",
        )
    cells = {
        (arm.configuration, workload, concurrency): repeats
        for (arm, workload, concurrency), repeats in cut(run)[0].items()
        if arm.target == target and (workload in workloads or not workloads)
    }
    return Side(run, target, cells)


def pairs(base: Side, new: Side) -> list[Pair]:
    """Return the cells that both sides have, in the base's order; raises UsageError without a speculative one."""
    common = [key for key in base.cells if key in new.cells]
    if not any(configuration != "ar" for configuration, _, _ in common):
        told = [f"{side.run.name} has {_words(side.cells)} of {side.target}" for side in (base, new)]
        raise UsageError(f"no speculative arm is on both sides: {'; '.join(told)}", "measure the same --spec and -k")
    return [Pair(*key, base.cells[key], new.cells[key], base.run, new.run) for key in common]


def aligned(pair: Pair) -> Pair | None:
    """Return a pair cut to the prompts that both sides have answered; None if there are none.

    Cells of one run are cut alike already; two runs may each have lost, or not yet answered, others. Which prompts say
    the same is the base's to tell, should the other run have lost that.
    """
    twins = pair.first[0].twins
    pair = replace(pair, new={repeat: replace(cell, twins=twins) for repeat, cell in pair.new.items()})
    ids = [{record.prompt_id for record in cell.records} for cell in pair.first]
    if ids[0] == ids[1]:
        return pair
    both = ids[0] & ids[1]
    if not both:
        return None
    cut = [{repeat: _only(cell, both) for repeat, cell in side.items()} for side in (pair.base, pair.new)]
    return replace(pair, base=cut[0], new=cut[1])


def _only(cell: RecordedCell, prompts: Collection[str]) -> RecordedCell:
    if len(prompts) == len(cell.records):
        return cell
    return replace(cell, cut=True, records=tuple(record for record in cell.records if record.prompt_id in prompts))


def _words(cells: Mapping[Key, object]) -> str:
    named: dict[str, dict[str, None]] = {}
    for configuration, workload, _ in cells:
        named.setdefault(configuration, {})[workload] = None
    return ", ".join(f"{name} ({', '.join(workloads)})" for name, workloads in named.items()) or "no results"


def cells_of(found: Sequence[Pair], *, base: bool) -> list[RecordedCell]:
    """Return all cells of one side of pairs."""
    return [cell for pair in found for cell in (pair.base if base else pair.new).values()]
