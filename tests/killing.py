"""Runs a conversion killed at one moment after the other, each time followed by the same command undisturbed.

``python killing.py MOMENT EVERY DIRECTORY VERB MODEL [OPTION...]`` kills the first time that MOMENT comes, then the
``EVERY``-th time after that, until a run gets to its end, and prints a line of JSON for each. A process that has
imported everything is forked, which is much faster than starting one.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import mxq.cli
from mxq.checkpoint.writer import ShardWriter
from mxq.convert import run  # noqa: F401  (to have it imported once)
from mxq.convert.journal import Journal
from mxq.formats import cpu

_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.copyfile")


def kill() -> None:
    """End this process as nothing can prevent."""
    os.kill(os.getpid(), signal.SIGKILL)


def patch(owner: object, name: str, value: object) -> None:
    """Set an attribute, for good."""
    setattr(owner, name, value)


def at(count: int) -> Callable[[], bool]:
    """Return what says True when it is called for the ``count``-th time."""
    calls = iter(range(1, count + 1))
    return lambda: next(calls, 0) == count


def before_recording(count: int) -> None:
    """Kill when the journal is about to be written."""
    now, record = at(count), Journal.record

    def killed(journal: Journal, line: dict[str, Any]) -> None:
        if now():
            kill()
        record(journal, line)

    patch(Journal, "record", killed)


def while_recording(count: int) -> None:
    """Kill when half of a line of the journal is written."""
    now, write = at(count), os.write

    def killed(descriptor: int, data: bytes) -> int:
        if len(data) > 20 and now():
            write(descriptor, bytes(data)[: len(data) // 2])
            kill()
        return write(descriptor, data)

    patch(os, "write", killed)


def after_recording(count: int) -> None:
    """Kill when the journal has been written."""
    now, record = at(count), Journal.record

    def killed(journal: Journal, line: dict[str, Any]) -> None:
        record(journal, line)
        if now():
            kill()

    patch(Journal, "record", killed)


def in_a_shard(count: int) -> None:
    """Kill when some of a shard's bytes are written."""
    now, write = at(count), ShardWriter.write

    def killed(writer: ShardWriter, name: str, start: int, values: Any) -> None:
        if now():
            write(writer, name, start, values.cast("B")[: values.nbytes // 2])
            kill()
        write(writer, name, start, values)

    patch(ShardWriter, "write", killed)


def before_a_change(count: int) -> None:
    """Kill when a file or directory is about to be made, renamed, cut or removed."""
    now = at(count)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[0], (str, os.PathLike)) and arguments[2] & os.O_ACCMODE
        if (writes or event in _CHANGES) and now():
            kill()

    sys.addaudithook(hook)


def forked(arguments: list[str], before: Callable[[], None] = lambda: None) -> tuple[int, str]:
    """Run mxq in a process of its own; return its exit code, minus the signal if one ended it, and what it said."""
    log = Path(arguments[2] + ".log")
    child = os.fork()
    if child == 0:
        with log.open("wb") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        before()
        try:
            mxq.cli.main(arguments)
        except SystemExit as error:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(error.code if isinstance(error.code, int) else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = log.read_text()
    log.unlink()
    return code, said


def digests(directory: Path) -> dict[str, str]:
    """The SHA-256 of every file."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()}


def main() -> None:
    """See the module."""
    moment, every, place, verb, model, *options = sys.argv[1:]
    cpu.quantize_measured(torch.zeros(1, 32, dtype=torch.bfloat16))  # to have the kernel loaded once
    count = 1
    while True:
        directory = Path(place, f"{moment}-{count}")
        directory.mkdir()
        arguments = [verb, model, str(directory / "out"), *options]
        code, _ = forked(arguments, lambda: globals()[moment](count))  # noqa: B023  (run at once)
        journal = directory / "out.partial" / "journal.jsonl"
        lines = journal.read_bytes().split(b"\n")[:-1] if journal.exists() else []
        recorded = sum(line.startswith(b'{"shard"') for line in lines)
        published = (directory / "out").exists()
        again, said = forked(arguments)
        left = sorted(file.name for file in directory.iterdir())
        found = digests(directory / "out") if (directory / "out").exists() else {}
        killed = {"count": count, "killed": code, "recorded": recorded, "published": published}
        print(json.dumps(killed | {"code": again, "said": said, "left": left, "files": found}), flush=True)
        shutil.rmtree(directory)
        if code == 0:
            return
        count += int(every)


if __name__ == "__main__":
    main()
