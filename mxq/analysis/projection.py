"""A measured run on hardware where it was not measured: the acceptance of its records, with predicted speeds."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mxq.analysis.summary import CellSummary, Summary
from mxq.errors import UsageError
from mxq.evaluate import Arm
from mxq.hardware.acceptance import Accepted, of_survival
from mxq.hardware.cost import Setup
from mxq.hardware.predict import Load, Prediction, predict


@dataclass(frozen=True)
class Projected:
    """One arm on one workload, predicted: nothing of it was run on that hardware."""

    arm: Arm
    workload: str
    prediction: Prediction

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        about = {"kind": "projection", "target": self.arm.target, "workload": self.workload}
        return about | self.prediction.as_json()


def project(
    summary: Summary, setups: Mapping[str, Setup], concurrency: Sequence[int] | None = None, load: Load | None = None
) -> tuple[Projected, ...]:
    """Project a run.

    Args:
        summary: of the run.
        setups: by target, ``bf16`` and ``mxfp4``; arms of a target that is not among them are left out.
        concurrency: requests in flight; by default those of the run.
        load: lengths of texts, whose concurrency does not count; by default those of each cell, on average.

    Raises:
        UsageError: the run has no speculative arm, or nothing of it tells how many drafts were accepted.
        MxqError: it does not fit the hardware.
    """
    if not summary.configurations:
        raise UsageError(
            f"{summary.run.name} has no speculative arm, so there is no acceptance to project",
            "run it with --spec, or predict without --run",
        )
    found = tuple(
        Projected(cell.arm, cell.workload, predict(setups[cell.arm.target], cell.arm.method, one, accepted))
        for cell, accepted in _accepted(summary)
        if cell.arm.target in setups
        for one in _loads(summary, cell, concurrency or summary.concurrencies, load)
    )
    if not any(one.arm.method != "ar" for one in found):
        raise UsageError(f"{summary.run.name} does not say what its passes accepted", "let `mxq eval` run on")
    return found


def _accepted(summary: Summary) -> Iterator[tuple[CellSummary, Accepted | None]]:
    for cell in summary.lowest:
        if cell.arm.method == "ar":
            yield cell, None
        elif cell.acceptance is not None:
            yield cell, of_survival(cell.acceptance.survival, cell.arm.num_speculative_tokens)


def _loads(summary: Summary, cell: CellSummary, concurrency: Sequence[int], load: Load | None) -> Iterator[Load]:
    output = max(1, round(cell.output_tokens / cell.requests))
    prompts = [
        record.prompt_tokens
        for recorded in summary.run.cells
        if (recorded.arm, recorded.workload, recorded.concurrency) == (cell.arm, cell.workload, cell.concurrency)
        for record in recorded.records
    ]
    for requests in concurrency:
        if load is None:
            yield Load.of_request(requests, round(statistics.mean(prompts)), output)
        else:
            yield Load(requests, load.context, load.prompt_tokens, load.output_tokens)
