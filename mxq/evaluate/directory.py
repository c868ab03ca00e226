"""The run directory: created once, held by one process at a time, only ever added to.

::

    run.json                    what the run is: command, versions, hardware, definition, sources of prompts, cells
    workloads/<name>.jsonl      the prompts as measured, with reference answers where there are any
    cells/<key>/records.jsonl   one line per request
    cells/<key>/cell.json       the cell's definition; rewritten once, when the cell is finished
    cells/<key>/near_ties.json  what a server said where answers part from plain ones, see mxq.evaluate.near_ties
    targets/<target>-layers.jsonl  the errors of its matrices, as mxq wrote them beside a conversion
    explain/<name>.json         why acceptance changed, see mxq.explain
    quality/<name>.json         perplexity and divergence of the targets, see mxq.quality
    servers/<arm>.log           what servers of an arm printed
    lm-eval/<target>/<task>/    lm-eval's results and samples, see mxq.evaluate.tasks

What one request after the other gives is kept as it comes. Requests that ran side by side are kept together, once the
last one is answered: what is left of a cell that was broken off could not be continued as it was.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mxq import files
from mxq.checkpoint.headers import open_regular
from mxq.errors import MxqError, UsageError
from mxq.evaluate.kept import keep_layers, keep_prompts
from mxq.evaluate.matrix import VLLM, Arm, Cell, Place, Plan
from mxq.evaluate.records import Record, RecordFile, cannot_write, read_records, write_records

FORMAT = 2
NEAR_TIES = "near_ties.json"
_LOCK = ".lock"
_TYPED = ("arms", "concurrency", "repeats", "engine_args", "engine_env")
_SHOWN_DIFFERENCES = 5
_IS = (" is ", " ")
"""Between a name and its value, and between an option and its value."""
# Of what run.json says: where a model lay, and what the system calls itself, change no number.
_MAY_DIFFER = re.compile(r"hardware\.(memory_bytes|system)|(targets\.\w+|drafter)\.spec")


class OpenCell:
    """A cell of a run that this process holds; ``answers`` are the texts of its records, in prompt order.

    ``whole``: its records are written together, by :meth:`complete`, and not as they come.
    """

    def __init__(self, path: Path, cell: Cell, prompt_ids: list[str], *, whole: bool = False) -> None:
        self.cell = cell
        self._path = path
        self._prompts = len(prompt_ids)
        state = path / "cell.json"
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
            if not state.exists():
                files.write_json(state, self._description() | {"state": "running"})
        self.finished = read_json(state).get("state") == "finished"
        if whole and not self.finished:
            (path / "records.jsonl").unlink(missing_ok=True)  # its writer died before the cell was finished
        self._file = None if self.finished or whole else RecordFile(path / "records.jsonl")
        records = read_cell(path, cell.arm)
        if [record.prompt_id for record in records] != prompt_ids[: len(records)]:
            raise MxqError(f"{path}/records.jsonl: not the prompts of the workload in order", "start a new run")
        self.answers = [record.text for record in records]

    @property
    def done(self) -> int:
        """Return how many prompts have a record."""
        return len(self.answers)

    def append(self, record: Record) -> None:
        """Add the record of the next prompt."""
        assert self._file is not None
        self._file.append(record)
        self.answers.append(record.text)

    def complete(self, records: Sequence[Record], facts: Mapping[str, Any]) -> None:
        """Write the records of all prompts, in prompt order, and seal the cell."""
        write_records(self._path / "records.jsonl", records)
        self.answers = [record.text for record in records]
        self.finish(facts)

    def records(self) -> list[Record]:
        """Return the records that there are."""
        return read_cell(self._path, self.cell.arm)

    @property
    def has_near_ties(self) -> bool:
        """Whether differences from plain decoding were looked into, be it in vain."""
        return (self._path / NEAR_TIES).exists()

    def keep_near_ties(self, told: Mapping[str, Any]) -> None:
        """Write what a server said of differences, which may be known only after the cell is sealed."""
        with _writing(self._path / NEAR_TIES):
            files.write_json(self._path / NEAR_TIES, told)

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Seal the cell once it has every prompt; ``facts`` about how it was run go into cell.json."""
        if self.finished or self.done < self._prompts:
            return
        sealed = {
            "state": "finished",
            "finished_at": _now(),
            "records": self.done,
            "records_sha256": files.sha256_file(self._path / "records.jsonl"),
            **facts,
        }
        with _writing(self._path / "cell.json"):
            files.write_json(self._path / "cell.json", self._description() | sealed)
        self.finished = True
        self.close()

    def close(self) -> None:
        """Close the record file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _description(self) -> dict[str, Any]:
        return described(self.cell) | {"definition": self.cell.definition}


def described(cell: Cell) -> dict[str, Any]:
    """Return where a cell is in its run, as run.json and cell.json say it."""
    place = {"workload": cell.workload, "concurrency": cell.concurrency, "repeat": cell.repeat}
    return {"arm": asdict(cell.arm)} | place


@contextlib.contextmanager
def open_run(path: Path, plan: Plan, environment: Mapping[str, Any]) -> Iterator[dict[Place, OpenCell]]:
    """Create or continue the run of ``plan`` in ``path`` and yield its cells.

    ``environment``: versions, hardware, engine facts; a run is continued only where they are what they were. Raises
    UsageError when the directory is something else, another run (saying what differs), or in use by another process.
    """
    refuse_foreign(path)
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
    with hold(path):
        if (path / "run.json").exists():
            refuse_unlike(path, plan, environment)
        else:
            what = {"definition": plan.definition(), "environment": dict(environment)}
            cells = {cell.key: described(cell) for cell in plan.cells()}
            started = {"format": FORMAT, "command": files.command_line(), "started_at": _now()}
            sources = {tokenized.workload.name: dict(tokenized.workload.source) for tokenized in plan.workloads}
            about = {"warnings": list(plan.warnings), "architecture": dict(plan.architecture), "sources": sources}
            noted = about | {"cells": cells}
            with _writing(path / "run.json"):
                files.write_json(path / "run.json", started | what | noted)
        with _writing(path / "workloads"):
            keep_prompts(path, plan)
        with _writing(path / "targets"):
            keep_layers(path, plan)
        ids = {w.workload.name: [prompt.id for prompt in w.workload.prompts] for w in plan.workloads}
        whole = plan.settings.engine == VLLM
        opened: dict[Place, OpenCell] = {}
        try:
            for cell in plan.cells():
                opened[cell.place] = OpenCell(path / "cells" / cell.key, cell, ids[cell.workload], whole=whole)
            yield opened
        finally:
            for open_cell in opened.values():
                open_cell.close()


def refuse_foreign(path: Path) -> None:
    """Raise UsageError if ``path`` is there and neither a run directory nor empty."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file", "give a directory for the run")
    # What a process killed at its very start leaves begins with a dot: the lock, a run.json not yet in place.
    if (
        path.is_dir()
        and not (path / "run.json").exists()
        and any(not entry.name.startswith(".") for entry in path.iterdir())
    ):
        raise UsageError(f"{path} is not empty and holds no run", "give a new directory, or one that holds a run")


def read_cell(path: Path, arm: Arm) -> list[Record]:
    """Return a cell's records; raises MxqError where they are not those that a finished cell was sealed with."""
    records_path = path / "records.jsonl"
    state = read_json(path / "cell.json")
    if state.get("state") == "finished" and (
        not records_path.exists() or files.sha256_file(records_path) != state["records_sha256"]
    ):
        raise MxqError(f"{records_path} was changed after the cell was finished", "restore it, or start a new run")
    return read_records(records_path, arm.num_speculative_tokens)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file of the run; raises MxqError naming the file when it is not one."""
    try:
        with open_regular(path) as stream:
            value = json.loads(stream.read().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MxqError(f"cannot read {path}: {error}", "the run directory is damaged: start a new run") from None
    if not isinstance(value, dict):
        raise MxqError(f"{path} does not hold an object", "the run directory is damaged: start a new run")
    return value


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Say in a line what could not be written."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from None


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Hold a run directory for this process; raises UsageError where another process holds it."""
    with _writing(path / _LOCK):
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        holder = files.lock(fd)
        if holder is not None:
            raise UsageError(
                f"another process ({holder}) is running in {path}", "wait for it, or use another directory"
            )
        files.sign(fd)
        yield
    finally:
        os.close(fd)


def refuse_unlike(path: Path, plan: Plan, environment: Mapping[str, Any]) -> None:
    """Raise UsageError where ``path`` holds another run than that of ``plan``, saying what differs."""
    what = {"definition": plan.definition(), "environment": dict(environment)}
    run = read_json(path / "run.json")
    if run.get("format") != FORMAT:
        raise UsageError(
            f"{path}/run.json has format {run.get('format')!r:.40}, and this mxq writes {FORMAT}",
            "use another directory",
        )
    there, here = (_facts({name: source.get(name) for name in what}) for source in (run, _as_json(what)))
    names = [name for name in sorted(there.keys() | here.keys()) if not _MAY_DIFFER.fullmatch(name)]
    differing = [name for name in names if there.get(name) != here.get(name)]
    if differing:
        shown = "; ".join(
            f"{name}{_IS[name.startswith('-')]}{there.get(name)} there, {here.get(name)} now"
            for name in differing[:_SHOWN_DIFFERENCES]
        )
        more = f"; and {len(differing) - _SHOWN_DIFFERENCES} more" if len(differing) > _SHOWN_DIFFERENCES else ""
        raise UsageError(f"{path} holds another run: {shown}{more}", "use another directory for this one")


def _facts(described: dict[str, Any]) -> dict[str, Any]:
    """Return each fact by its name; arms, which follow from three options, by these options as they are typed."""
    definition = described["definition"]
    try:
        arms = [Arm(**arm) for arm in definition["arms"]]
        options: dict[str, list[str]] = {
            "targets": [arm.target for arm in arms],
            "--spec": [arm.method for arm in arms],
            "-k": [str(arm.num_speculative_tokens) for arm in arms if arm.num_speculative_tokens],
            "--concurrency": [str(number) for number in definition["concurrency"]],
            "--repeats": [str(definition["repeats"])],
            "--engine-arg": definition["engine_args"],
            "--env": definition["engine_env"],
        }
        typed = {name: " ".join(dict.fromkeys(values)) or None for name, values in options.items()}
    except (KeyError, TypeError):  # not a run's description: as it stands
        return _flat(described)
    rest = {name: value for name, value in definition.items() if name not in _TYPED}
    return _flat(described | {"definition": rest}) | typed


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for part, inner in items for key, leaf in _flat(inner, f"{name}.{part}").items()}
    return {name.removeprefix(".").removeprefix("definition.").removeprefix("environment."): value}


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
