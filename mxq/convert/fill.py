"""Make one file of a conversion: its tensors read, quantized or copied, and written to their places by threads.

The work is cut into tasks of some megabytes, in the order of the file. Threads take them in that order, and reading,
the kernel and writing hold no lock of Python's; the thread that called takes the checksum along behind them. Where the
cuts are does not depend on the number of threads, hence neither do the bytes, nor the last digit of an error.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mxq.checkpoint import Checkpoint
from mxq.checkpoint.headers import nbytes
from mxq.checkpoint.writer import Shard, ShardWriter
from mxq.convert.error import ErrorMeter
from mxq.convert.partial import SpoiledError
from mxq.convert.plan import Group
from mxq.errors import MxqError
from mxq.formats.cpu_rows import KINDS, Measures, Rows
from mxq.formats.rules import BLOCK
from mxq.models.qwen35 import Piece
from mxq.progress import Advance

_ELEMENTS_AT_ONCE = 1 << 20  # few enough for a chunk to stay in the processor's cache from reading to writing
_CHUNKS_A_TASK = 16
_BYTES_AT_ONCE = 16 << 20


@dataclass(frozen=True)
class Work:
    """A file to be made.

    Attributes:
        source: what it is made from.
        rule: the scale rule of what is quantized.
        shard: what it holds.
        groups: where that comes from, in the order of the shard.
    """

    source: Checkpoint
    rule: str
    shard: Shard
    groups: tuple[Group, ...]

    @property
    def bytes_before(self) -> int:
        """Bytes of the source that it is made from."""
        return sum(_task_bytes(self.source, task) for group in self.groups for task in _whole(group))


@dataclass(frozen=True, slots=True)
class _Task:
    """Rows ``start`` to ``stop`` of a quantized piece's tensor, or those bytes of a tensor that is kept.

    ``place`` is the row, or byte, of the output with which it begins.
    """

    group: Group
    piece: Piece | None
    start: int
    stop: int
    place: int


def fill(work: Work, directory: Path, jobs: int, advance: Advance) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Make a file.

    Args:
        work: which.
        directory: where; the file must not be there yet.
        jobs: how many threads work on it.
        advance: told the bytes of the source as they are done.

    Returns:
        (checksum, layers): ``bytes`` and ``sha256`` of the file; the errors of the matrices in it, in its order.

    Raises:
        MxqError: the source cannot be read, or a weight holds NaN or infinity.
        OSError: the file cannot be written.
    """
    meters: dict[Piece, ErrorMeter] = {}
    tasks = [part for group in work.groups for task in _whole(group) for part in _cut(work.source, task)]
    with ShardWriter(directory, work.shard) as writer, ThreadPoolExecutor(jobs, "fill") as pool:
        try:
            for task, measures in zip(tasks, pool.map(lambda task: _carry_out(work, task, writer), tasks), strict=True):
                if task.piece is not None:
                    meters.setdefault(task.piece, ErrorMeter()).add(measures)
                writer.hash()
                advance(_task_bytes(work.source, task))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return writer.checksum, [_layer(work.source, piece, meter) for piece, meter in meters.items()]


def _whole(group: Group) -> Iterator[_Task]:
    if not group.pieces:
        yield _Task(group, None, 0, group.outputs[0].nbytes, 0)
    place = 0
    for piece in group.pieces:
        yield _Task(group, piece, piece.start, piece.stop, place)
        place += piece.stop - piece.start


def _cut(source: Checkpoint, task: _Task) -> Iterator[_Task]:
    step = _BYTES_AT_ONCE if task.piece is None else _rows_at_once(source, task.piece) * _CHUNKS_A_TASK
    for start in range(task.start, task.stop, step):
        stop = min(start + step, task.stop)
        yield _Task(task.group, task.piece, start, stop, task.place + start - task.start)


def _rows_at_once(source: Checkpoint, piece: Piece) -> int:
    return max(1, _ELEMENTS_AT_ONCE // source.tensors[piece.tensor].shape[-1])


def _task_bytes(source: Checkpoint, task: _Task) -> int:
    if task.piece is None:
        return task.stop - task.start
    tensor = source.tensors[task.piece.tensor]
    return (task.stop - task.start) * nbytes(tensor.dtype, tensor.shape[-1:])


def _carry_out(work: Work, task: _Task, writer: ShardWriter) -> list[Measures]:
    if task.piece is None:
        name = task.group.outputs[0].name
        view = _memory.of("copy", task.stop - task.start)
        work.source.read_into(name, task.start, view.data)
        writer.write(name, task.place, view.data)
        return []
    weight, scales = task.group.outputs
    tensor = work.source.tensors[task.piece.tensor]
    columns, kind = tensor.shape[-1], KINDS[tensor.dtype]
    rows = Rows(tensor.dtype, work.rule, measured=True)
    found = []
    step = _rows_at_once(work.source, task.piece)
    for start in range(task.start, task.stop, step):
        count = min(step, task.stop - start)
        row_bytes = columns * np.dtype(kind.bits).itemsize
        x = _memory.of("x", count * row_bytes)
        packed, scale = (_memory.of(f"1/{n}", count * (columns // n)).reshape(count, -1) for n in (2, BLOCK))
        work.source.read_into(tensor.name, start * row_bytes, x.data)
        measures = rows.quantize(x.view(kind.bits).reshape(count, columns), packed, scale)
        if measures.bad_blocks:
            raise _not_finite(work.source, task.piece)
        row = task.place + start - task.start
        writer.write(weight.name, row * packed.shape[-1], packed.data)
        writer.write(scales.name, row * scale.shape[-1], scale.data)
        found.append(measures)
    return found


class _Memory(threading.local):
    """A thread's arrays, used again and again: new memory costs more than the work in it."""

    def __init__(self) -> None:
        self._held: dict[str, npt.NDArray[np.uint8]] = {}

    def of(self, name: str, count: int) -> npt.NDArray[np.uint8]:
        """Return so many bytes that are the caller's until the next call with this name."""
        if len(self._held.get(name, ())) < count:
            self._held[name] = np.empty(count, np.uint8)
        return self._held[name][:count]


_memory = _Memory()


def _layer(source: Checkpoint, piece: Piece, meter: ErrorMeter) -> dict[str, Any]:
    shape = [piece.stop - piece.start, source.tensors[piece.tensor].shape[-1]]
    return {"module": piece.module, "tensor": piece.tensor, "shape": shape, **meter.as_dict(shape[0] * shape[1])}


def _not_finite(source: Checkpoint, piece: Piece) -> MxqError:
    tensor = source.tensors[piece.tensor]
    kind, columns = KINDS[tensor.dtype], tensor.shape[-1]
    bits = np.empty((piece.stop - piece.start, columns), kind.bits)
    source.read_into(piece.tensor, piece.start * bits[0].nbytes, bits.data.cast("B"))
    bad = (bits & kind.infinity) == kind.infinity
    row = int(bad.any(axis=-1).argmax())
    where = "" if piece.tensor == f"{piece.module}.weight" else f" ({piece.module})"
    return SpoiledError(
        f"tensor {piece.tensor}{where} holds {int(bad.sum())} values that are NaN or infinite, the first in row {row}",
        "the source is damaged: MXFP4 cannot hold such values, and nothing was left behind",
    )
