"""Reading a run directory back, complete or not, without touching it: analysis starts here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxq.errors import MxqError, UsageError
from mxq.evaluate.directory import FORMAT, read_cell, read_json
from mxq.evaluate.matrix import Arm
from mxq.evaluate.records import Record


@dataclass(frozen=True)
class RecordedCell:
    """One cell's records in prompt order; ``finished`` says whether all its prompts are there."""

    arm: Arm
    workload: str
    finished: bool
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Run:
    """A run as recorded. ``info`` is run.json; ``prompts`` is the number of prompts by workload."""

    path: Path
    info: dict[str, Any]
    prompts: dict[str, int]
    cells: tuple[RecordedCell, ...]

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
        """Return what was doubtful about the models when the run was started."""
        return tuple(self.info.get("warnings", ()))


def read_run(path: Path) -> Run:
    """Read a run directory; raises UsageError where there is none, MxqError where it is damaged."""
    if not (path / "run.json").is_file():
        raise UsageError(f"{path} holds no run (no run.json)", "give a directory made by `mxq eval --out`")
    info = read_json(path / "run.json")
    if info.get("format") != FORMAT:
        raise UsageError(f"{path}/run.json has format {info.get('format')!r}", f"this mxq reads format {FORMAT}")
    try:
        if not all(isinstance(warning, str) for warning in info.get("warnings", ())):
            raise TypeError("a warning that is no text")
        prompts = {workload["name"]: workload["prompts"] for workload in info["definition"]["workloads"]}
        cells = tuple(
            _read_cell(path / "cells" / key, Arm(**cell["arm"]), cell["workload"])
            for key, cell in info["cells"].items()
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise MxqError(f"{path}/run.json is not a run's description ({error!r})", "start a new run") from None
    return Run(path, info, prompts, cells)


def _read_cell(path: Path, arm: Arm, workload: str) -> RecordedCell:
    if not (path / "cell.json").exists():
        return RecordedCell(arm, workload, finished=False, records=())
    finished = read_json(path / "cell.json").get("state") == "finished"
    return RecordedCell(arm, workload, finished, tuple(read_cell(path, arm)))
