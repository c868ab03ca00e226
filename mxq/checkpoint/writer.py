"""Writing a checkpoint whose every tensor's name, type and shape is known before the first byte is.

Shards are laid out first; each file then gets its header, and the tensors are filled in piece by piece, in any order,
so that nothing larger than a piece is ever in memory.
"""

import ctypes
import errno
import hashlib
import os
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from mxq.checkpoint.headers import SIZES, encode_header, nbytes
from mxq.checkpoint.reader import SINGLE

_HASHED_AT_ONCE = 1 << 20
_BUFFER = 1 << 20
_PATIENCE_S = 0.005
_FLUSHED_AT_ONCE = 64 << 20


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written; ``dtype`` is a safetensors type name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return nbytes(self.dtype, self.shape)


@dataclass(frozen=True)
class Shard:
    """One file of the checkpoint: groups of tensors that stay together, in the order in which they lie."""

    file: str
    groups: tuple[tuple[TensorSpec, ...], ...]

    @property
    def tensors(self) -> list[TensorSpec]:
        """All tensors of the file, in order."""
        return [tensor for group in self.groups for tensor in group]


def layout(groups: Iterable[Sequence[TensorSpec]], max_shard_size: int) -> list[Shard]:
    """Distribute groups of tensors over files of at most ``max_shard_size`` bytes of data, or one group if larger.

    Within a file, groups of wider types come first: then every tensor lies at a multiple of its element's size.
    """
    files: list[list[tuple[TensorSpec, ...]]] = []
    room = -1
    for group in groups:
        size = sum(tensor.nbytes for tensor in group)
        if room < size:
            files.append([])
            room = max_shard_size
        files[-1].append(tuple(group))
        room -= size
    count = len(files)
    names = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    return [
        Shard(name, tuple(sorted(file, key=lambda group: -SIZES[group[0].dtype])))
        for name, file in zip(names, files, strict=True)
    ]


def index(shards: Sequence[Shard]) -> dict[str, Any] | None:
    """Return the content of the index file, or None where there is one shard and hence no index."""
    if len(shards) == 1:
        return None
    return index_of({tensor.name: (tensor.nbytes, shard.file) for shard in shards for tensor in shard.tensors})


def index_of(tensors: Mapping[str, tuple[int, str]]) -> dict[str, Any]:
    """Return the content of the index of ``tensors``: name -> bytes and file.

    ``total_size`` is the bytes of all tensors, as transformers counts it.
    """
    return {
        "metadata": {"total_size": sum(size for size, _ in tensors.values())},
        "weight_map": {name: file for name, (_, file) in sorted(tensors.items())},
    }


class ShardWriter:
    """Writes one shard, by as many threads as call :meth:`write`.

    A context manager that on success makes sure that every tensor was filled to the last byte and is on the disk. The
    checksum is taken of what is still in memory where it can be, and else of the file.

    Attributes:
        file: what is written.
        checksum: its ``bytes`` and ``sha256``, once the block has ended.
    """

    def __init__(self, directory: Path, shard: Shard, buffers: int = 0) -> None:
        """Prepare the file; ``buffers`` is how many of a megabyte :meth:`buffer` hands out."""
        self.file = directory / shard.file
        self.checksum: dict[str, Any] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._left = {tensor.name: tensor.nbytes for tensor in shard.tensors}
        self._places: dict[str, tuple[int, int]] = {}
        offset = 0
        for tensor in shard.tensors:
            end = offset + tensor.nbytes
            header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
            self._places[tensor.name] = (offset, end)
            offset = end
        begin = encode_header(header)
        self._start, self._end = len(begin), len(begin) + offset
        self._lock = threading.Lock()
        self._digest, self._hashed = hashlib.sha256(begin), len(begin)
        self._read = memoryview(bytearray(_HASHED_AT_ONCE))
        # No SimpleQueue: CPython 3.11's can wait for ever, whatever its timeout, where several threads get.
        self._free = queue.LifoQueue[bytearray]()
        self._buffers = {id(buffer): buffer for buffer in (bytearray(_BUFFER) for _ in range(buffers))}
        for buffer in self._buffers.values():
            self._free.put(buffer)
        self._written: dict[int, memoryview | int] = {}  # by place: what is still in memory, how much only in the file
        self._flusher, self._flush, self._flushed = ThreadPoolExecutor(1, "flush"), Future[None](), 0
        self._flush.set_result(None)
        self._descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _reserve(self._descriptor, self._end)
            self._put(0, memoryview(begin))
        except BaseException:
            os.close(self._descriptor)
            raise

    def buffer(self, count: int) -> memoryview | None:
        """Return memory of ``count`` bytes to be filled and then written, once; None if there is none.

        It waits a little for one: the checksum, which gives them back, is then what should have the processor. Ask for
        what is written in the order of the file, because in that order they come back.
        """
        if not self._buffers or count > _BUFFER:
            return None
        try:
            return memoryview(self._free.get(timeout=_PATIENCE_S))[:count]
        except queue.Empty:
            return None

    def write(self, name: str, start: int, values: memoryview) -> None:
        """Write bytes of tensor ``name``, from its byte ``start`` on; ``values`` is contiguous, of any type.

        Those of a :meth:`buffer` are not the caller's any more.
        """
        view = values.cast("B")
        begin, end = self._places[name]
        if start < 0 or begin + start + len(view) > end:
            raise ValueError(f"{name} is larger than its place in {self.file.name}")
        with self._lock:  # which the system has as well for a file, and waits for busily
            self._put(self._start + begin + start, view)
            if len(view):
                self._written[self._start + begin + start] = view if id(view.obj) in self._buffers else len(view)
            self._left[name] -= len(view)

    def hash(self) -> None:
        """Take into the checksum what is written as far as nothing is missing; for one thread, while others write.

        Another one brings it to the disk meanwhile, so that there is less to wait for in the end.
        """
        while (found := self._written.pop(self._hashed, None)) is not None:
            if isinstance(found, int):
                self._read_and_hash(self._hashed + found)
            else:
                self._digest.update(found)
                self._hashed += len(found)
                self._free.put(self._buffers[id(found.obj)])
        if self._hashed - self._flushed >= _FLUSHED_AT_ONCE and self._flush.done():
            self._flush.result()
            self._flush, self._flushed = self._flusher.submit(os.fdatasync, self._descriptor), self._hashed

    def _read_and_hash(self, end: int) -> None:
        while self._hashed < end:
            view = self._read[: end - self._hashed]
            count = os.preadv(self._descriptor, [view], self._hashed)
            if not count:
                raise OSError(errno.EIO, "what was written is not there", str(self.file))
            self._digest.update(view[:count])
            self._hashed += count

    def _put(self, position: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], position + done)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if wrong := [name for name, left in self._left.items() if left]:
                    raise ValueError(f"{self.file.name}: {', '.join(wrong)} not filled to the end")
                self.hash()
                self._read_and_hash(self._end)  # of what was written twice, the rest
                self._flush.result()
                self.checksum = {"bytes": self._hashed, "sha256": self._digest.hexdigest()}
                os.fsync(self._descriptor)
        finally:
            self._flusher.shutdown()
            os.close(self._descriptor)


def _reserve(descriptor: int, size: int) -> None:
    """Ask for the room of a whole file where the file system can give it.

    A disk that is too small is known at once, and a file that does not grow keeps its writers waiting less. Not by
    posix_fallocate, which writes to every block where the file system cannot.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if fallocate is None:
        return
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if fallocate(descriptor, 0, 0, size) and (error := ctypes.get_errno()) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(error, os.strerror(error))
