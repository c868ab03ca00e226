"""Runs to compare: two targets on servers, of which the second loses drafts as a test says."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from served import TOKENS, ServedCell, serve, server_plan

from mxq.evaluate import Cell, Plan, Run, read_run

Change = Callable[[Cell, ServedCell], Mapping[str, Any] | None]


def losing(share: float, *, faster: float = 1.0, workload: str | None = None) -> Change:
    """Let MXFP4 accept one draft fewer in a share of its passes, and be faster by a factor, on a workload or on all."""

    def change(cell: Cell, made: ServedCell) -> None:
        if cell.arm.target != "mxfp4":
            return
        here = share if workload in (None, cell.workload) else 0.0
        other = ServedCell(
            made.k, made.concurrency, per_pass_s=made.per_pass_s / faster, prefill_s=made.prefill_s / faster
        )
        for record in made.records:
            rng = random.Random(f"{cell.workload}/{record.prompt_id}/{cell.repeat}")
            passes = [max(0, accepted - (rng.random() < here)) for accepted in record.accepted or ()]
            while made.k and 1 + sum(passes) + len(passes) < TOKENS:
                passes.append(rng.randint(0, made.k))
            other.answer(record.prompt_id, passes, tokens=list(record.token_ids))
        made.records, made.counters, made.now = other.records, other.counters, other.now

    return change


SAME = losing(0.0)


def compared_run(
    path: Path, change: Change = SAME, *, plan: Plan | None = None, mxfp4: str | None = "native", **options: Any
) -> Run:
    """Fill a run directory and read it; ``options`` are those of :func:`served.server_plan`."""
    asked: dict[str, Any] = {"concurrencies": (1,), "prompts": 24, "repeats": 2} | options
    return read_run(serve(path, plan or server_plan(**asked), change=change, mxfp4=mxfp4))
