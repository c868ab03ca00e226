"""What a node of a Ray cluster does: make one file of a conversion, under the name that this attempt was given.

Errors go back as plain data, since an exception that has travelled has lost its hint.
"""

import dataclasses
import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mxq
from mxq.checkpoint import Checkpoint
from mxq.checkpoint.fp8 import numbers
from mxq.checkpoint.identity import fingerprint
from mxq.convert.origin import states
from mxq.convert.partial import SpoiledError
from mxq.convert.work import Work
from mxq.errors import MxqError

SHARED = "source and output must be in file systems that all nodes share, at the same paths"


@dataclass(frozen=True)
class Order:
    """A file to be made on another machine.

    Attributes:
        work: what; of its source only the path, which is absolute, for a large one's headers are many megabytes.
        fingerprint: the source's.
        states: the state of the files of the source that the work reads, as :func:`mxq.convert.origin.states`.
        attempt: the file to be written, which is not there yet.
        jobs: how many threads work.
    """

    work: Work
    fingerprint: str
    states: dict[str, list[Any]]
    attempt: Path
    jobs: int

    @classmethod
    def of(cls, work: Work, source_fingerprint: str, attempt: Path, jobs: int) -> "Order":
        """Return the order for an attempt at ``work``."""
        path = Path(os.path.abspath(work.source.path))  # noqa: PTH100  (not resolved: links are part of a hub's cache)
        reference = Checkpoint(path, {}, {}, {}, None, {})
        order = dataclasses.replace(work, source=reference)
        return cls(order, source_fingerprint, states(work.source, files_of(work)), attempt, jobs)


def files_of(work: Work) -> set[str]:
    """Return the names of the source's files that hold what a work is made from."""
    return {file for group in work.groups for name in group.reads() for file in work.source.files_of(name)}


def code() -> str:
    """Return the version of mxq and a checksum of its code, which decides the bytes."""
    root = Path(mxq.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return f"{mxq.__version__} ({digest.hexdigest()[:12]})"


def make(order: Order) -> dict[str, Any]:
    """Carry out an order; returns ``checksum`` and ``layers`` as :meth:`Work.make`, or what :func:`raise_` takes."""
    try:
        source = _source(order)
        if not order.attempt.parent.is_dir():
            raise MxqError(f"{order.attempt.parent} is not there", SHARED)
        shard = dataclasses.replace(order.work.shard, file=order.attempt.name)
        work = dataclasses.replace(order.work, source=source, shard=shard)
        checksum, layers = work.make(order.attempt.parent, order.jobs, lambda amount, title=None: None)
        return {"checksum": checksum, "layers": layers}
    except MxqError as error:
        spoiled = isinstance(error, SpoiledError)
        return {"failed": "spoiled" if spoiled else "mxq", "what": error.message, "hint": error.hint}
    except OSError as error:
        return {"failed": "os", "what": error.strerror or str(error), "number": error.errno}


def raise_(answer: dict[str, Any], node: str) -> None:
    """Raise the error that an answer tells of, if it does, as it was on ``node``."""
    failed = answer.get("failed")
    if failed is None:
        return
    what = f"{answer['what']} (on node {node})"
    if failed == "os":
        raise OSError(answer["number"], what)
    raise (SpoiledError if failed == "spoiled" else MxqError)(what, answer["hint"])


def _source(order: Order) -> Checkpoint:
    path = order.work.source.path
    try:
        source, found = _opened(path)
    except MxqError as error:
        raise MxqError(error.message, SHARED) from None
    there = states(source, order.states.keys() & source.metadata.keys())
    # Not the time of the last change: attributes that a node has cached may be older than another's.
    if found != order.fingerprint or any(
        (there[name][0], there[name][2]) != (state[0], state[2]) for name, state in order.states.items()
    ):
        raise MxqError(f"{path} is another checkpoint than where the conversion was started", SHARED)
    return source


@functools.lru_cache(maxsize=1)
def _opened(path: Path) -> tuple[Checkpoint, str]:
    source = numbers(Checkpoint.open(path))
    return source, fingerprint(source)
