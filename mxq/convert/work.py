"""Make one file of a conversion: tensors quantized, copied or dequantized, and how far off the first are."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mxq.checkpoint import Checkpoint, fp8
from mxq.checkpoint.headers import SIZES
from mxq.checkpoint.writer import Shard, ShardWriter
from mxq.convert.calibration import Fold, Take
from mxq.convert.error import ErrorMeter
from mxq.convert.fill import Copy, buffer, copies, fill, memory
from mxq.convert.partial import SpoiledError
from mxq.convert.plan import Group
from mxq.formats.cpu_rows import KINDS, Measures, Rows
from mxq.formats.rules import BLOCK
from mxq.models.qwen35 import Piece
from mxq.progress import Advance

if TYPE_CHECKING:
    from mxq.calibrate.results import Calibrated
    from mxq.formats.device_rows import DeviceRows

_ELEMENTS_AT_ONCE = 1 << 20  # few enough for codes to stay in the processor's cache until they are written
_HIGHEST_SAFE = 252  # the next scale is 2^126, and 4 times that is more than any bfloat16 or float32
_DAMAGED = "the source is damaged: MXFP4 cannot hold such values, and nothing was left behind"


@dataclass(frozen=True)
class Work:
    """A file to be made.

    Attributes:
        source: what it is made from.
        rule: the scale rule of what is quantized.
        shard: what it holds.
        groups: where that comes from, in the order of the shard.
        devices: what quantizes, as torch calls them, each for its share of the threads; the CPU's kernel if there are
            none.
        calibrated: what is not quantized or copied here, but there already.
    """

    source: Checkpoint
    rule: str
    shard: Shard
    groups: tuple[Group, ...]
    devices: tuple[str, ...] = ()
    calibrated: "Calibrated | None" = None

    @property
    def bytes_before(self) -> int:
        """Bytes of the source that it is made from, scales of FP8 apart."""
        return sum(task.nbytes for task in self._tasks())

    def make(
        self, directory: Path, jobs: int, advance: Advance, batches: "Batches | None" = None
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Make the file.

        Args:
            directory: where; the file must not be there yet.
            jobs: how many threads work on it.
            advance: told the bytes of the source as they are done.
            batches: what sorts the tasks, if their order is not to be that of the file.

        Returns:
            (checksum, layers): ``bytes`` and ``sha256`` of the file; the errors of its matrices, in its order.

        Raises:
            MxqError: the source cannot be read, or a weight holds NaN or infinity.
            OSError: the file cannot be written.
        """
        tasks = list(self._tasks())
        try:
            checksum, results = fill(directory, self.shard, batches(tasks) if batches else [tasks], jobs, advance)
        except fp8.DamagedError as error:
            raise SpoiledError(error.message, _DAMAGED) from None
        meters = {piece: ErrorMeter() for group in self.groups for piece in group.pieces}
        for task, measures in results:
            if isinstance(task, _Quantize | Take):
                meters[task.piece].add(measures or ())
        return checksum, [self._layer(piece, meter) for piece, meter in meters.items()]

    def _tasks(self) -> Iterator["_Task"]:
        kept = {} if self.calibrated is None else self.calibrated.kept
        chosen = {} if self.calibrated is None else self.calibrated.modules
        for group in self.groups:
            if group.action == "keep" and (name := group.outputs[0].name) in kept:
                yield Fold(kept[name], name)
            elif group.action == "keep":
                yield from copies(self.source, group.outputs[0].name)
            if group.action == "dequantize":
                yield from _dequantized(self.source, group.outputs[0].name)
            place = 0
            for piece in group.pieces:
                count = piece.stop - piece.start
                if self.calibrated is not None and piece.module in chosen:
                    nbytes = count * _stored_row_bytes(self.source, piece.tensor)
                    yield Take(self.source, self.calibrated, group, piece, place, nbytes)
                    place += count
                    continue
                step = _rows_at_once(self.source, piece)
                for start in range(piece.start, piece.stop, step):
                    stop = min(start + step, piece.stop)
                    yield _Quantize(self, group, piece, start, stop, place + start - piece.start)
                place += count

    def _layer(self, piece: Piece, meter: ErrorMeter) -> dict[str, Any]:
        shape = [piece.stop - piece.start, self.source.tensors[piece.tensor].shape[-1]]
        return {"module": piece.module, "tensor": piece.tensor, "shape": shape, **meter.as_dict(shape[0] * shape[1])}


@dataclass(frozen=True, slots=True)
class _Quantize:
    """Rows ``start`` to ``stop`` of a piece's tensor; ``place`` is the row of the output with which they begin."""

    work: Work
    group: Group
    piece: Piece
    start: int
    stop: int
    place: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * _stored_row_bytes(self.work.source, self.piece.tensor)

    @property
    def reads(self) -> str:
        return self.piece.tensor

    def __call__(self, writer: ShardWriter) -> list[Measures]:
        source = self.work.source
        weight, scales = self.group.outputs
        tensor = source.tensors[self.piece.tensor]
        columns, row_bytes = tensor.shape[-1], _row_bytes(source, self.piece)
        devices = self.work.devices
        rows = _rows(tensor.dtype, self.work.rule, devices[memory.thread % len(devices)] if devices else None)
        count, found = self.stop - self.start, []
        # Scales lie behind all codes of their matrix: until then they would keep memory that codes wait for.
        made = (buffer(writer, "codes", count * columns // 2), memory.of("scales", count * columns // BLOCK).data)
        packed, scale = (np.frombuffer(view, np.uint8).reshape(count, -1) for view in made)
        step = max(1, rows.at_once // columns)
        for first in range(0, count, step):
            some = slice(first, min(first + step, count))
            x = memory.of("x", (some.stop - first) * row_bytes)
            source.read_into(tensor.name, (self.start + first) * row_bytes, x.data)
            measures = rows.quantize(x.view(KINDS[tensor.dtype].bits).reshape(-1, columns), packed[some], scale[some])
            if measures.bad_blocks or measures.highest > _HIGHEST_SAFE:
                _refuse_unfit(source, self.piece)
            found.append(measures)
        for output, view in zip((weight, scales), made, strict=True):
            writer.write(output.name, self.place * (len(view) // count), view)
        return found


@dataclass(frozen=True, slots=True)
class _Dequantize:
    """Rows ``start`` to ``stop`` of an FP8 tensor that is written in bfloat16."""

    source: Checkpoint
    name: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * _stored_row_bytes(self.source, self.name)

    @property
    def reads(self) -> str:
        return self.name

    def __call__(self, writer: ShardWriter) -> None:
        source = fp8.rounded(self.source)
        row_bytes = source.tensors[self.name].shape[-1] * SIZES[source.tensors[self.name].dtype]
        view = memory.of("copy", (self.stop - self.start) * row_bytes).data
        source.read_into(self.name, self.start * row_bytes, view)
        writer.write(self.name, self.start * row_bytes, view)


_Task = Copy | Fold | Take | _Dequantize | _Quantize
Batches = Callable[[Sequence[_Task]], Iterable[Sequence[_Task]]]
"""What divides the tasks of a file into those that are carried out together, in the order of a tensor's rows."""


def _dequantized(source: Checkpoint, name: str) -> Iterator[_Dequantize]:
    *axes, columns = source.tensors[name].shape
    rows, step = math.prod(axes), max(1, _ELEMENTS_AT_ONCE // max(1, columns))
    for start in range(0, rows, step):
        yield _Dequantize(source, name, start, min(start + step, rows))


def _stored_row_bytes(source: Checkpoint, name: str) -> int:
    tensor = fp8.stored(source).tensors[name]
    return tensor.shape[-1] * SIZES[tensor.dtype]


@functools.lru_cache
def _rows(kind: str, rule: str, device: str | None) -> "Rows | DeviceRows":
    if device is None:
        return Rows(kind, rule, measured=True)
    from mxq.formats.device_rows import DeviceRows  # and torch with it

    return DeviceRows(kind, rule, device)


def _row_bytes(source: Checkpoint, piece: Piece) -> int:
    tensor = source.tensors[piece.tensor]
    return tensor.shape[-1] * np.dtype(KINDS[tensor.dtype].bits).itemsize


def _rows_at_once(source: Checkpoint, piece: Piece) -> int:
    return max(1, _ELEMENTS_AT_ONCE // source.tensors[piece.tensor].shape[-1])


def _refuse_unfit(source: Checkpoint, piece: Piece) -> None:
    """Raise SpoiledError if a piece holds what MXFP4 has no value for, or rounds to one that is 2^128."""
    tensor = source.tensors[piece.tensor]
    kind, columns = KINDS[tensor.dtype], tensor.shape[-1]
    bits = np.empty((piece.stop - piece.start, columns), kind.bits)
    source.read_into(piece.tensor, piece.start * bits[0].nbytes, bits.data.cast("B"))
    magnitude = bits & (1 << 8 * bits.itemsize - 1) - 1
    too_large = kind.infinity - (1 << kind.mantissa - 2)  # 1.75 * 2^127 in bfloat16 and float32: 3.5 rounds up to 4
    for limit, what in (
        (kind.infinity, "are NaN or infinite"),
        (too_large, "MXFP4 rounds to 2^128, which is infinite"),
    ):
        bad = magnitude >= limit
        if bad.any():
            row = int(bad.any(axis=-1).argmax())
            where = "" if piece.tensor == f"{piece.module}.weight" else f" ({piece.module})"
            raise SpoiledError(
                f"tensor {piece.tensor}{where} holds {int(bad.sum())} values that {what}, the first in row {row}",
                _DAMAGED,
            )
