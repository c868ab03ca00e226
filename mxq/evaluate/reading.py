"""Reading a run directory back, complete or not, without touching it: analysis starts here.

What cannot be a record is left out, and said; the rest of its cell is kept. Whoever goes on with a run reads through
:mod:`mxq.evaluate.directory`, which refuses such a file.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mxq import files
from mxq.errors import MxqError, UsageError
from mxq.evaluate.directory import FORMAT, NEAR_TIES, read_json
from mxq.evaluate.matrix import VLLM, Arm, Cell, Settings
from mxq.evaluate.records import Record, read_what_is_left

_DESCRIPTION = {"arm", "workload", "concurrency", "repeat", "definition", "state", "records", "records_sha256"}
_SHOWN = 3
"""As many lines of a file that are no records are said one by one."""


@dataclass(frozen=True)
class RecordedCell:
    """One cell's records in prompt order; ``finished`` says whether all its prompts are there.

    ``facts`` is what was noted of how it was measured; empty before it is finished. ``damage`` says what is wrong with
    its file of records, and ``cut`` whether analysis has left some of them out. ``twins``: prompts of its workload that
    say the same as an earlier one, by id, with that one.
    """

    arm: Arm
    workload: str
    concurrency: int
    repeat: int
    finished: bool
    records: tuple[Record, ...]
    facts: Mapping[str, Any]
    damage: tuple[str, ...] = ()
    cut: bool = False
    twins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A run as recorded. ``info`` is run.json; ``prompts`` is the number of prompts by workload.

    ``name`` is what people know it by: its path, unless it comes with mxq.
    """

    path: Path
    info: dict[str, Any]
    prompts: dict[str, int]
    cells: tuple[RecordedCell, ...]
    name: str

    @property
    def finished(self) -> bool:
        """Whether every cell is."""
        return all(cell.finished for cell in self.cells)

    @property
    def arms(self) -> tuple[Arm, ...]:
        """Return the arms in the run's order."""
        return tuple(dict.fromkeys(cell.arm for cell in self.cells))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what was doubtful about the models when the run was started, and what is damaged now."""
        return (*self.info.get("warnings", ()), *(said for cell in self.cells for said in cell.damage))


def read_run(path: Path) -> Run:
    """Read a run directory; raises UsageError where there is none, MxqError where more than records is damaged."""
    if not (path / "run.json").is_file():
        raise UsageError(f"{path} holds no run (no run.json)", "give a directory made by `mxq eval --out`")
    info = read_json(path / "run.json")
    if info.get("format") != FORMAT:
        raise UsageError(f"{path}/run.json has format {info.get('format')!r:.40}", f"this mxq reads format {FORMAT}")
    try:
        if not all(isinstance(warning, str) for warning in info.get("warnings", ())):
            raise TypeError("a warning that is no text")
        prompts = {workload["name"]: workload["prompts"] for workload in info["definition"]["workloads"]}
        if not all(isinstance(name, str) and type(number) is int for name, number in prompts.items()):
            raise TypeError("a workload without a name, or a number of prompts")
        drafter = info["definition"]["drafter"]
        for model in (*info["definition"]["targets"].values(), *([] if drafter is None else [drafter])):
            if not isinstance(model["fingerprint"], dict):
                raise TypeError("a model without a fingerprint")
        whole = info["definition"].get("engine") == VLLM
        twins = {name: _twins(path / "workloads" / f"{name}.jsonl") for name in prompts}
        cells = tuple(
            _read_cell(path / "cells" / key, Arm(**cell.pop("arm")), cell, info["definition"], whole, twins)
            for key, cell in copy.deepcopy(info["cells"]).items()
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MxqError(f"{path}/run.json is not a run's description ({error!r})", "start a new run") from None
    return Run(path, info, prompts, cells, str(path))


def _twins(path: Path) -> dict[str, str]:
    """Return what :class:`RecordedCell` calls twins; none where a workload cannot be read, which no number needs."""
    first: dict[str, str] = {}
    twins: dict[str, str] = {}
    try:
        for line in path.read_bytes().splitlines():
            prompt = json.loads(line)
            said = json.dumps([prompt.get("messages"), prompt.get("turns")])
            earlier = first.setdefault(said, str(prompt["id"]))
            if earlier != prompt["id"]:
                twins[str(prompt["id"])] = earlier
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
    return twins


def _read_cell(
    path: Path,
    arm: Arm,
    place: dict[str, Any],
    definition: dict[str, Any],
    whole: bool,
    twins: Mapping[str, Mapping[str, str]],
) -> RecordedCell:
    if type(place["concurrency"]) is not int or type(place["repeat"]) is not int:
        raise TypeError("a cell without concurrency and repeat")
    if type(arm.num_speculative_tokens) is not int or not all(
        isinstance(name, str) for name in (arm.target, arm.method)
    ):
        raise TypeError("a cell without an arm")
    state = read_json(path / "cell.json") if (path / "cell.json").exists() else {}
    if state:
        _refuse_foreign(path, Cell(arm, **place, definition=state["definition"]), definition)
    finished = state.get("state") == "finished"
    records: list[Record] = []
    damage: list[str] = []
    if finished or (state and not whole):
        records, wrong = read_what_is_left(path / "records.jsonl", arm.num_speculative_tokens)
        damage = _damage(path / "records.jsonl", wrong, state if finished else {})
    ties = read_json(path / NEAR_TIES) if finished and (path / NEAR_TIES).exists() else {}
    facts = {name: value for name, value in state.items() if finished and name not in _DESCRIPTION}
    lost = facts.get("lost", [])
    if not isinstance(lost, list) or not all(isinstance(said, str) for said in lost):
        raise MxqError(f"{path}/cell.json does not say which servers were lost, but {lost!r:.40}", "start a new run")
    return RecordedCell(
        arm,
        **place,
        finished=finished,
        records=tuple(records),
        facts=facts | ties,
        damage=tuple(damage),
        twins=twins.get(place["workload"], {}),
    )


def _damage(path: Path, wrong: Sequence[str], sealed: Mapping[str, Any]) -> list[str]:
    """Return in lines for people what is wrong with a file of records; ``sealed``: cell.json of a finished cell."""
    if sealed and not path.exists():
        return [f"{path} is missing: the cell is left out"]
    told = [f"{line}: it is left out, and its prompt in all cells of the workload" for line in wrong[:_SHOWN]]
    if len(wrong) > _SHOWN:
        told.append(f"{path}: {len(wrong) - _SHOWN} more lines are left out")
    if sealed and files.sha256_file(path) != sealed["records_sha256"]:
        told.append(f"{path} was changed after the cell was finished: its numbers are not those that were measured")
    return told


def _refuse_foreign(path: Path, cell: Cell, run: Mapping[str, Any]) -> None:
    """Raise MxqError for a cell that was measured otherwise than its key, or its run, says."""
    unlike = [f.name for f in fields(Settings) if cell.definition.get(f.name) != run.get(f.name)]
    if unlike or cell.key != path.name:
        what = f"has another {unlike[0]} than its run" if unlike else "describes another cell than its name"
        raise MxqError(f"{path}/cell.json {what}", "cells of different runs do not belong together: start a new run")
