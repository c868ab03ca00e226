"""Fill a file of a checkpoint: tasks carried out by threads, the checksum taken along behind them.

The work is cut into tasks of a megabyte or two, in the order of the file. Threads take them in that order, and reading,
kernels and writing hold no lock of Python's. Where the cuts are does not depend on the number of threads, hence neither
do the bytes.
"""

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.writer import Shard, ShardWriter
from mxq.progress import Advance

_BYTES_AT_ONCE = 1 << 20
_BUFFERS = 4

R_co = TypeVar("R_co", covariant=True)


class Task(Protocol[R_co]):
    """Some bytes of a file to be made, and how."""

    @property
    def nbytes(self) -> int:
        """What it adds to the progress."""

    def __call__(self, writer: ShardWriter) -> R_co:
        """Write the bytes."""


def fill(
    directory: Path, shard: Shard, batches: Iterable[Sequence[Task[R_co]]], jobs: int, advance: Advance
) -> tuple[dict[str, Any], list[tuple[Task[R_co], R_co]]]:
    """Make a file.

    Args:
        directory: where; the file must not be there yet.
        shard: its tensors.
        batches: what fills them, best in the order of the file; a batch is asked for when the one before it is done.
        jobs: how many threads work.
        advance: told the ``nbytes`` of tasks as they are done.

    Returns:
        (checksum, results): ``bytes`` and ``sha256`` of the file; every task with what it returned, in order.

    Raises:
        OSError: the file cannot be written.
    """
    results = []
    with (
        ShardWriter(directory, shard, buffers=_BUFFERS * (jobs + 2)) as writer,
        ThreadPoolExecutor(jobs, "fill") as pool,
    ):
        try:
            for tasks in batches:
                for task, result in zip(tasks, pool.map(lambda task: task(writer), tasks), strict=True):
                    results.append((task, result))
                    writer.hash()
                    advance(task.nbytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return writer.checksum, results


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes ``start`` to ``stop`` of a tensor that is copied."""

    source: Checkpoint
    name: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """How many."""
        return self.stop - self.start

    @property
    def reads(self) -> str:
        """The tensor of the source that is read."""
        return self.name

    def __call__(self, writer: ShardWriter) -> None:
        """Copy them."""
        view = buffer(writer, "copy", self.nbytes)
        self.source.read_into(self.name, self.start, view)
        writer.write(self.name, self.start, view)


def copies(source: Checkpoint, name: str) -> Iterator[Copy]:
    """Yield what copies a tensor."""
    count = source.info(name).nbytes
    for start in range(0, count, _BYTES_AT_ONCE):
        yield Copy(source, name, start, min(start + _BYTES_AT_ONCE, count))


def buffer(writer: ShardWriter, name: str, count: int) -> memoryview:
    """Return memory to be filled and then written, once: the writer's, or what the thread has by that name."""
    return writer.buffer(count) or memory.of(name, count).data


class _Memory(threading.local):
    """A thread's arrays, used again and again: new memory costs more than the work in it.

    Attributes:
        thread: a number that no other thread has.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.thread = next(self._numbers)
        self._held: dict[str, npt.NDArray[np.uint8]] = {}

    def of(self, name: str, count: int) -> npt.NDArray[np.uint8]:
        """Return so many bytes that are the caller's until the next call with this name."""
        if len(self._held.get(name, ())) < count:
            self._held[name] = np.empty(count, np.uint8)
        return self._held[name][:count]


memory = _Memory()
"""Of the thread that asks."""
