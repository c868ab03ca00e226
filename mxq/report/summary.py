"""From a run directory to the numbers that tables and figures show: repeatable, and nothing is written.

Cells are compared on the same prompts. While a run is not complete, each workload is therefore cut to the prompts
that all of its arms have answered.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mxq.engines import Sampling
from mxq.errors import MxqError
from mxq.evaluate import Arm, Record, Run
from mxq.progress import progress
from mxq.report.answers import right
from mxq.stats import Acceptance, Identity, Throughput, acceptance, identity, throughput
from mxq.workloads import load

Records = dict[tuple[Arm, str], Sequence[Record]]

TARGETS = ("bf16", "mxfp4")

_IDLE = {
    "mtp": "Check that the checkpoint still has its own mtp.* tensors and that its config excludes (or ignores) them",
    "dflash": "Check that the drafter was made for this target, and its target_layer_ids and mask_token_id",
}

POINT_ESTIMATES = (
    "These are point estimates without intervals: a small difference neither shows a change nor rules one out."
)


@dataclass(frozen=True)
class CellSummary:
    """One cell in numbers.

    ``acceptance`` is None for plain decoding and where no request had a verify pass. ``speedup_same_precision`` and
    ``speedup_bf16`` are this cell's tokens/s over those of plain decoding by the same target and by the bf16 target.
    ``identity`` compares greedy output with that of the same target's plain arm, None for that arm and when sampled;
    later turns of conversations count where both arms had answered the same before.
    ``right`` counts right answers among ``checked`` ones, those that have a reference; both 0 unless asked for.
    """

    arm: Arm
    workload: str
    requests: int
    cut_by_length: int
    acceptance: Acceptance | None
    throughput: Throughput
    speedup_same_precision: float | None
    speedup_bf16: float | None
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

    def cell(self, target: str, configuration: str, workload: str) -> CellSummary | None:
        """Return a cell, None if the run does not have it (yet)."""
        for cell in self.cells:
            if (cell.arm.target, cell.arm.configuration, cell.workload) == (target, configuration, workload):
                return cell
        return None

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the targets of the run, bf16 first."""
        return tuple(target for target in TARGETS if any(arm.target == target for arm in self.run.arms))

    @property
    def configurations(self) -> tuple[str, ...]:
        """Return method and budget of the speculative arms, as ``dflash-15``."""
        return tuple(dict.fromkeys(arm.configuration for arm in self.run.arms if arm.method != "ar"))

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
            idle = [f"{c.arm.label} on {c.workload}" for c in self.cells if c.drafter_idle and c.arm.method == method]
            if idle:
                found.append(
                    f"acceptance length is exactly 1.000 for {', '.join(idle)}: not one draft was accepted, so the "
                    f"drafter is probably not doing anything. {check}; and that the chat template is the one the "
                    "drafter was trained with."
                )
        return tuple(found)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values; numbers are not rounded."""
        return {
            "run": str(self.run.path),
            "finished": self.run.finished,
            "prompts": {name: {"used": used, "of": total} for name, (used, total) in self.prompts.items()},
            "note": POINT_ESTIMATES,
            "warnings": list(self.warnings),
            "cells": [{**asdict(cell), "label": cell.arm.label} for cell in self.cells],
        }


def summarise(run: Run, *, check_answers: bool = False) -> Summary:
    """Compute the summary of a run; raises MxqError when no prompt has been answered by all arms yet.

    ``check_answers`` runs code that the models wrote, see :mod:`mxq.report.answers`.
    """
    records: Records = {}
    prompts: dict[str, tuple[int, int]] = {}
    for workload, total in run.prompts.items():
        cells = [cell for cell in run.cells if cell.workload == workload]
        used = min(len(cell.records) for cell in cells)
        prompts[workload] = (used, total)
        records.update({(cell.arm, workload): cell.records[:used] for cell in cells if used})
    if not records:
        raise MxqError(f"{run.path}: no prompt has been answered by all arms yet", "let `mxq eval` run on")
    greedy = Sampling(**run.info["definition"]["sampling"]).greedy
    verdicts = _verdicts(run, records) if check_answers else {}
    summaries = tuple(
        _summarise_cell(arm, workload, records, greedy, verdicts.get((arm, workload), ())) for arm, workload in records
    )
    return Summary(run, prompts, summaries)


def _summarise_cell(arm: Arm, workload: str, records: Records, greedy: bool, verdicts: Sequence[bool]) -> CellSummary:
    mine = records[arm, workload]
    plain = records.get((Arm(arm.target, "ar"), workload))
    plain_bf16 = records.get((Arm("bf16", "ar"), workload))
    speed = _throughput(mine)
    speculative = arm.method != "ar"
    alike = [(a, b) for a, b in zip(mine, plain or (), strict=False) if a.prompt_sha256 == b.prompt_sha256]
    return CellSummary(
        arm=arm,
        workload=workload,
        requests=len(mine),
        cut_by_length=sum(record.finish_reason == "length" for record in mine),
        acceptance=acceptance([record.passes for record in mine], arm.num_speculative_tokens) if speculative else None,
        throughput=speed,
        speedup_same_precision=speed.tokens_per_s / _throughput(plain).tokens_per_s if plain else None,
        speedup_bf16=speed.tokens_per_s / _throughput(plain_bf16).tokens_per_s if plain_bf16 else None,
        identity=identity([a.token_ids for a, _ in alike], [b.token_ids for _, b in alike])
        if plain and speculative and greedy
        else None,
        right=sum(verdicts),
        checked=len(verdicts),
    )


def _verdicts(run: Run, records: Records) -> dict[tuple[Arm, str], list[bool]]:
    """Judge every answer that has a reference."""
    found: dict[tuple[Arm, str], list[bool]] = {}
    prompts = {name: load(str(run.path / "workloads" / f"{name}.jsonl")).prompts for name in run.prompts}
    with progress("checking answers", sum(map(len, records.values())), "answers") as advance:
        for (arm, workload), answers in records.items():
            judged = found[arm, workload] = []
            for prompt, record in zip(prompts[workload], answers, strict=False):
                verdict = right(prompt, record.text)
                if verdict is not None:
                    judged.append(verdict)
                advance(1)
    return found


def _throughput(records: Sequence[Record]) -> Throughput:
    return throughput([record.output_tokens for record in records], [record.duration_s for record in records])
