"""From a run directory to the numbers that tables and figures show: repeatable, and nothing is written.

Acceptance is that of a cell's first repeat: greedy answers do not change, and the same answers again are no more
evidence. Speed is over all repeats.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mxq.analysis.answers import right
from mxq.analysis.checks import RunCheck, alike, check_run, failed, plain_places
from mxq.analysis.common import Cells, cut
from mxq.analysis.speed import Speed, speed, withheld
from mxq.engines import Sampling
from mxq.errors import MxqError
from mxq.evaluate import Arm, RecordedCell, Run
from mxq.evaluate.checks import DRAFTS_ACCEPTED
from mxq.progress import progress
from mxq.stats import Acceptance, Identity, acceptance, counted_acceptance, identity
from mxq.workloads import load

TARGETS = ("bf16", "mxfp4")

_IDLE = {
    "mtp": "Check that the checkpoint still has its own mtp.* tensors and that its config excludes (or ignores) them",
    "dflash": "Check that the drafter was made for this target, and its target_layer_ids and mask_token_id",
}

_SHOWN = 8
"""As many failed checks are shown one by one."""

POINT_ESTIMATES = (
    "These are point estimates without intervals: a small difference neither shows a change nor rules one out. "
    "`mxq compare` has intervals and a verdict."
)


@dataclass(frozen=True)
class CellSummary:
    """One cell in numbers, over its repeats.

    ``acceptance`` is None for plain decoding and where no request had a verify pass. ``speed`` is None where it must
    not be shown as that of MXFP4: ``throughput_withheld`` says why. ``identity`` compares greedy output with that of
    the same target's plain arm, one request at a time if that was measured; None for that arm and when sampled. Later
    turns of conversations count where both arms had answered the same before. ``right`` counts right answers among
    ``checked`` ones, those that have a reference; both 0 unless asked for.
    """

    arm: Arm
    workload: str
    concurrency: int
    repeats: int
    requests: int
    output_tokens: int
    cut_by_length: int
    acceptance: Acceptance | None
    speed: Speed | None
    throughput_withheld: str | None
    identity: Identity | None
    right: int
    checked: int

    @property
    def drafter_idle(self) -> bool:
        """Whether there were verify passes and not one draft was accepted."""
        return self.acceptance is not None and self.acceptance.nothing_accepted


@dataclass(frozen=True)
class Summary:
    """A run in numbers; ``prompts`` is (used here, in the workload) by workload."""

    run: Run
    prompts: dict[str, tuple[int, int]]
    cells: tuple[CellSummary, ...]
    checks: tuple[RunCheck, ...]

    def cell(
        self, target: str, configuration: str, workload: str, concurrency: int | None = None
    ) -> CellSummary | None:
        """Return a cell, by default at the lowest concurrency; None if the run does not have it (yet)."""
        at = self.concurrencies[0] if concurrency is None else concurrency
        for cell in self.cells:
            if (cell.arm.target, cell.arm.configuration) == (target, configuration) and (
                cell.workload,
                cell.concurrency,
            ) == (workload, at):
                return cell
        return None

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """Return the numbers of requests in flight that have results, ascending."""
        return tuple(sorted({cell.concurrency for cell in self.cells}))

    @property
    def lowest(self) -> tuple[CellSummary, ...]:
        """Return the cells with the fewest requests in flight, at which acceptance and answers are compared."""
        return tuple(cell for cell in self.cells if cell.concurrency == self.concurrencies[0])

    @property
    def failed_checks(self) -> list[RunCheck]:
        """Return the checks that found something wrong."""
        return failed(self.checks)

    @property
    def contradictions(self) -> list[RunCheck]:
        """Return the failed checks after which numbers are not to be trusted: all but that a drafter does nothing."""
        return [made for made in self.failed_checks if made.check.name != DRAFTS_ACCEPTED]

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the targets that have results, bf16 first."""
        return tuple(target for target in TARGETS if any(arm.target == target for arm in self._measured))

    @property
    def configurations(self) -> tuple[str, ...]:
        """Return method and budget of the speculative arms that have results, as ``dflash-15``."""
        return tuple(dict.fromkeys(arm.configuration for arm in self._measured if arm.method != "ar"))

    @property
    def missing(self) -> tuple[Arm, ...]:
        """Return the arms that have no results yet."""
        measured = self._measured
        return tuple(arm for arm in self.run.arms if arm not in measured)

    @property
    def _measured(self) -> list[Arm]:
        """Arms with results, in the order of the run."""
        there = {cell.arm for cell in self.cells}
        return [arm for arm in self.run.arms if arm in there]

    @property
    def workloads(self) -> tuple[str, ...]:
        """Return the workloads that have results."""
        return tuple(workload for workload, (used, _) in self.prompts.items() if used)

    @property
    def conversations(self) -> dict[str, int]:
        """Return how many conversations a workload has, for those with later turns."""
        described = self.run.info["definition"]["workloads"]
        return {facts["name"]: facts["conversations"] for facts in described if "conversations" in facts}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what the reader must know before believing any number."""
        found = list(self.run.warnings)
        for method, check in _IDLE.items():
            idle = [c for c in self.cells if c.drafter_idle and c.arm.method == method]
            if idle:
                where = dict.fromkeys(f"{c.arm.label} on {c.workload}" for c in idle)
                found.append(
                    f"acceptance length is exactly 1.000 for {', '.join(where)}: not one draft was accepted, so the "
                    f"drafter is probably not doing anything. {check}; and that the chat template is the one the "
                    "drafter was trained with."
                )
        others = self.contradictions
        found += [f"check failed: {made.check.name}. {made.where}: {made.check.detail}" for made in others[:_SHOWN]]
        if len(others) > _SHOWN:
            found.append(f"{len(others) - _SHOWN} more checks failed; --json has all of them")
        return tuple(found)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values; numbers are not rounded."""
        return {
            "run": str(self.run.path),
            "finished": self.run.finished,
            "prompts": {name: {"used": used, "of": total} for name, (used, total) in self.prompts.items()},
            "note": POINT_ESTIMATES,
            "warnings": list(self.warnings),
            "failed_checks": len(self.failed_checks),
            "checks": [made.as_json() for made in self.checks],
            "cells": [{**asdict(cell), "label": cell.arm.label} for cell in self.cells],
        }


def summarise(run: Run, *, check_answers: bool = False) -> Summary:
    """Compute the summary of a run; raises MxqError when no prompt has been answered by all arms yet.

    ``check_answers`` runs code that the models wrote, see :mod:`mxq.analysis.answers`.
    """
    cells, prompts = cut(run)
    verdicts = _verdicts(run, cells) if check_answers else {}
    try:
        greedy = Sampling(**run.info["definition"]["sampling"]).greedy
        checks = check_run(run, [cell for repeats in cells.values() for cell in repeats.values()])
        summaries = tuple(_summarise_cell(run, place, cells, greedy, verdicts.get(place, ())) for place in cells)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise MxqError(
            f"{run.path}: run.json or a cell.json does not hold what is noted there ({error!r})", "start a new run"
        ) from None
    return Summary(run, prompts, summaries, tuple(checks))


def _summarise_cell(
    run: Run, place: tuple[Arm, str, int], cells: Cells, greedy: bool, verdicts: Sequence[bool]
) -> CellSummary:
    arm, workload, concurrency = place
    repeats = cells[place]
    first = next(iter(repeats.values()))
    plain = cells.get((Arm(arm.target, "ar"), workload, concurrency), {})
    speculative = arm.method != "ar"
    why = withheld(run, repeats)
    return CellSummary(
        arm=arm,
        workload=workload,
        concurrency=concurrency,
        repeats=len(repeats),
        requests=len(first.records),
        output_tokens=sum(record.output_tokens for record in first.records),
        cut_by_length=sum(record.finish_reason == "length" for record in first.records),
        acceptance=_acceptance(first) if speculative else None,
        speed=None if why else speed(repeats, plain, cells.get((Arm("bf16", "ar"), workload, concurrency), {})),
        throughput_withheld=why,
        identity=_identity(first, cells) if speculative and greedy else None,
        right=sum(verdicts),
        checked=len(verdicts),
    )


def _acceptance(cell: RecordedCell) -> Acceptance | None:
    """Return acceptance by the records' passes, by the server's counters where these are not known."""
    passes = [known for record in cell.records if (known := record.passes) is not None]
    if len(passes) == len(cell.records):
        return acceptance(passes, cell.arm.num_speculative_tokens)
    return counted(cell)


def counted(cell: RecordedCell) -> Acceptance | None:
    """Return acceptance by the server's counters; None where it has none, or they cannot be (a check says so)."""
    counters = cell.facts.get("counters") or {}
    if not counters.get("drafts"):
        return None
    try:
        return counted_acceptance(
            counters["requests"], counters["drafts"], counters["accepted"], counters["per_position"]
        )
    except ValueError:
        return None


def _identity(cell: RecordedCell, cells: Cells) -> Identity | None:
    plain = next(filter(None, (cells.get(place, {}).get(cell.repeat) for place in plain_places(cell))), None)
    if plain is None:
        return None
    pairs = alike(cell, plain)
    return identity([a.token_ids for a, _ in pairs], [b.token_ids for _, b in pairs])


def _verdicts(run: Run, cells: Cells) -> dict[tuple[Arm, str, int], list[bool]]:
    """Judge every answer that has a reference, at the lowest concurrency, by cell."""
    found: dict[tuple[Arm, str, int], list[bool]] = {}
    lowest = min(concurrency for _, _, concurrency in cells)
    answers = {place: next(iter(repeats.values())).records for place, repeats in cells.items() if place[2] == lowest}
    prompts = {
        name: {prompt.id: prompt for prompt in load(str(run.path / "workloads" / f"{name}.jsonl")).prompts}
        for name in run.prompts
    }
    with progress("checking answers", sum(map(len, answers.values())), "answers") as advance:
        for place, records in answers.items():
            judged = found[place] = []
            for record in records:
                verdict = right(prompts[place[1]][record.prompt_id], record.text)
                if verdict is not None:
                    judged.append(verdict)
                advance(1)
    return found
