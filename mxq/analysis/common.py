"""The prompts that cells have in common: cells are compared on the same ones.

While a run is not complete, or where records of it are damaged, each workload is cut to the prompts that all of its
arms have answered. Cells of a server are there as a whole or not at all, and those that are there are shown.
"""

from collections.abc import Sequence
from dataclasses import replace

from mxq.errors import MxqError
from mxq.evaluate import Arm, RecordedCell, Run
from mxq.evaluate.matrix import VLLM

Cells = dict[tuple[Arm, str, int], dict[int, RecordedCell]]
"""By arm, workload and concurrency, and then by repeat; cut to common prompts."""


def cut(run: Run) -> tuple[Cells, dict[str, tuple[int, int]]]:
    """Return the cells of a run cut to common prompts, and how many these are of how many by workload.

    Raises MxqError when there is none.
    """
    cells: Cells = {}
    prompts: dict[str, tuple[int, int]] = {}
    for workload, total in run.prompts.items():
        mine = [cell for cell in run.cells if cell.workload == workload]
        common = _common(mine, whole=run.info["definition"]["engine"] == VLLM)
        prompts[workload] = (len(common), total)
        for cell in mine:
            records = {record.prompt_id: record for record in cell.records}
            if common and records.keys() >= set(common):
                kept = replace(cell, records=tuple(records[asked] for asked in common))
                place = cells.setdefault((cell.arm, workload, cell.concurrency), {})
                place[cell.repeat] = _without_totals(kept) if cell.finished and len(common) < total else kept
    if not cells:
        damage = [said for cell in run.cells for said in cell.damage]
        if damage:
            raise MxqError(f"{run.path}: no prompt is left that all arms have answered. {damage[0]}", "start a new run")
        raise MxqError(f"{run.path}: no prompt has been answered by all arms yet", "let `mxq eval` run on")
    return cells, prompts


def _common(cells: Sequence[RecordedCell], *, whole: bool) -> list[str]:
    """Return the prompts that all cells of a workload have answered, in order.

    Later repeats on their way do not take back what there is; a file of records that is gone, or a server's cell that
    is not there yet, takes its own cell only.
    """
    counted = [cell for cell in cells if cell.repeat == 0 or (cell.finished and cell.damage)]
    counted = [cell for cell in counted if cell.records or not (whole or cell.finished)]
    asked = [[record.prompt_id for record in cell.records] for cell in counted]
    everywhere = set.intersection(*map(set, asked)) if asked else set()
    return [prompt for prompt in min(asked, key=len, default=[]) if prompt in everywhere]


def _without_totals(cell: RecordedCell) -> RecordedCell:
    """Return a cell that has lost records without what was counted over all of them."""
    return replace(cell, cut=True, facts={k: v for k, v in cell.facts.items() if k not in ("counters", "wall_s")})
