"""A checkpoint opened for reading: its config, where each tensor lies, and tensors or rows of them on demand."""

import contextlib
import copy
import dataclasses
import fnmatch
import functools
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mxq.checkpoint.headers import DTYPES, SIZES, TensorInfo, header_length, parse_header, read_header, read_json
from mxq.checkpoint.quantization import QuantizationConfig, quantization_of, quark_names
from mxq.errors import MxqError, UsageError

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_READ_AT_ONCE = 1 << 30  # Linux moves at most 2 GiB per call
_MAX_DEPTH = 64
_NUMBERED = re.compile(r"(.*-)\d+-of-(\d{1,9})\.safetensors")


class Elsewhere(Protocol):
    """A safetensors file that is not on this disk."""

    @property
    def size(self) -> int:
        """Its size in bytes."""

    def read(self, start: int, count: int) -> bytes:
        """Return ``count`` bytes from byte ``start`` on; raise MxqError if they cannot be had."""


class Checkpoint:
    """A directory of config.json and safetensors files. Opening it reads headers, not weights.

    Attributes:
        path: the directory.
        config: config.json.
        tensors: every tensor by name, in the order of the files; packed weights by Quark's names.
        stored: the names in ``tensors`` that are others in the files -> those.
        metadata: the metadata of each safetensors file, by file name.
        index: the index file's content, or None for a checkpoint of one file.
        elsewhere: files that are not in the directory, by name.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        tensors: dict[str, TensorInfo],
        metadata: dict[str, dict[str, str]],
        index: dict[str, Any] | None,
        elsewhere: Mapping[str, Elsewhere],
    ) -> None:
        self.path, self.config, self.metadata, self.index = path, config, metadata, index
        self.tensors, self.stored = quark_names(tensors)
        self.elsewhere = elsewhere

    @classmethod
    def open(cls, path: Path, elsewhere: Mapping[str, Elsewhere] | None = None) -> "Checkpoint":
        """Open the checkpoint in ``path``.

        Args:
            path: the directory.
            elsewhere: safetensors files of the checkpoint that are not in it, by name.

        Raises:
            UsageError: the directory is not a checkpoint of safetensors files with a config.json.
            MxqError: a file is missing, truncated or lies about its content.
        """
        config = read_config(path)
        elsewhere = elsewhere or {}
        weight_map, index = _weight_map(path, {*_names(path), *elsewhere}, str(path))
        tensors: dict[str, TensorInfo] = {}
        metadata: dict[str, dict[str, str]] = {}
        for file in _files(weight_map):
            metadata[file], found = _header(inside(path, file), elsewhere.get(file))
            for name, tensor in found.items():
                if name in tensors:
                    raise MxqError(
                        f"{path}: tensor {name} is in {tensors[name].file.name} and in {file}",
                        "remove what is left over",
                    )
                tensors[name] = tensor
        if weight_map is not None:
            _check_index(path / INDEX, weight_map, tensors)
            _check_numbers(path / INDEX, metadata)
        return cls(path, config, tensors, metadata, index, elsewhere)

    @functools.cached_property
    def quantization(self) -> QuantizationConfig | None:
        """How the weights are quantized; None for a checkpoint that is not.

        Raises:
            MxqError: they are quantized in a way that mxq does not know.
        """
        return quantization_of(self.config, where=str(self.path))

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The size in bytes of every safetensors file that holds a tensor, by its name."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():  # the last of a file ends with it
            sizes[tensor.file.name] = max(tensor.end, sizes.get(tensor.file.name, 0))
        return sizes

    def files_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the safetensors files that must be there to read a tensor."""
        return (self.tensors[name].file.name,)

    def with_files_in(self, directory: Path) -> "Checkpoint":
        """Return the same checkpoint, whose files that are elsewhere are in ``directory`` when they are read."""
        moved = copy.copy(self)
        moved.tensors = {
            name: dataclasses.replace(tensor, file=directory / tensor.file.name)
            if tensor.file.name in self.elsewhere
            else tensor
            for name, tensor in self.tensors.items()
        }
        moved.elsewhere = {}
        return moved

    def read(self, name: str) -> "torch.Tensor":
        """Return a tensor's values, in memory of their own.

        Raises:
            MxqError: there is no such tensor, or its file became shorter.
        """
        tensor = self.info(name)
        buffer = self._bytes(tensor, tensor.start, tensor.nbytes)
        return buffer.view(DTYPES[tensor.dtype]).view(tensor.shape)

    def read_rows(self, name: str, start: int, stop: int) -> "torch.Tensor":
        """Return rows ``start`` to ``stop`` of a tensor seen as a matrix [rows, K] of its last axis, and only those.

        Raises:
            IndexError: it has no such rows.
            MxqError: as :meth:`read`.
        """
        tensor = self.info(name)
        columns = tensor.shape[-1]
        if not 0 <= start <= stop <= math.prod(tensor.shape[:-1]):
            raise IndexError(f"{name} {list(tensor.shape)} has no rows {start} to {stop}")
        row_bytes = columns * SIZES[tensor.dtype]
        buffer = self._bytes(tensor, tensor.start + start * row_bytes, (stop - start) * row_bytes)
        return buffer.view(DTYPES[tensor.dtype]).view(stop - start, columns)

    def read_bytes(self, name: str, chunk: int) -> "Iterator[torch.Tensor]":
        """Yield a tensor's bytes (uint8), at most ``chunk`` at a time."""
        count = self.info(name).nbytes
        for start in range(0, count, chunk):
            yield self.read_part(name, start, min(start + chunk, count))

    def read_part(self, name: str, start: int, stop: int) -> "torch.Tensor":
        """Return bytes ``start`` to ``stop`` of a tensor (uint8)."""
        tensor = self.info(name)
        return self._bytes(tensor, tensor.start + start, stop - start)

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        """Fill ``view`` (bytes) with those of a tensor from byte ``start`` on.

        Raises:
            IndexError: it has not as many.
            MxqError: as :meth:`read`.
        """
        tensor = self.info(name)
        if not 0 <= start <= start + len(view) <= tensor.nbytes:
            raise IndexError(f"{name} has no bytes {start} to {start + len(view)}")
        self._fill(tensor, tensor.start + start, view)

    def info(self, name: str) -> TensorInfo:
        """Return where a tensor lies; raise MxqError if there is none of that name."""
        try:
            return self.tensors[name]
        except KeyError:
            raise MxqError(f"{self.path} holds no tensor {name}") from None

    def _bytes(self, tensor: TensorInfo, start: int, count: int) -> "torch.Tensor":
        import torch

        buffer = torch.empty(count, dtype=torch.uint8)
        self._fill(tensor, start, buffer.numpy().data)
        return buffer

    def _fill(self, tensor: TensorInfo, start: int, view: memoryview) -> None:
        if tensor.file.name in self.elsewhere:
            view[:] = self.elsewhere[tensor.file.name].read(start, len(view))
        else:
            _read_into(tensor.file, start, view)


def read_config(path: Path) -> dict[str, Any]:
    """Return the config.json of a checkpoint's directory.

    Raises:
        UsageError: there is none.
        MxqError: it is not a JSON object, or one that nests too deep.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is not a directory", "give the directory that holds the model's config.json")
    file = inside(path, "config.json")
    try:
        config = read_json(file)
    except FileNotFoundError:
        raise UsageError(
            f"{path} holds no config.json",
            "give the directory of a Hugging Face checkpoint, with its config and shards",
        ) from None
    if _depth(config) > _MAX_DEPTH:  # what is read can be deeper than what is written
        raise MxqError(f"{file} nests deeper than {_MAX_DEPTH} levels", "put the model's own there")
    return config


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = [part for part in level if isinstance(part, dict | list)]
        level = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
    return depth


def inside(path: Path, name: str) -> Path:
    """Return the file ``name`` of a checkpoint's directory, making sure that it lies there.

    A link may lead elsewhere in the directory or, as in the Hugging Face cache, to the ``blobs`` beside ``snapshots``
    and on to those that all models share.

    Raises:
        MxqError: the name or the link leads out of the checkpoint.
    """
    file = path / name
    if name in ("", ".", "..") or Path(name).name != name or "\\" in name or not name.isprintable():
        raise MxqError(
            f"{path}: {name!r:.200} leads out of the checkpoint's directory", "its index is not to be trusted"
        )
    with contextlib.suppress(OSError, RuntimeError):
        home, real = path.resolve(), file.resolve()
        places = [home]
        if home.parent.name == "snapshots":
            model = home.parents[1]
            places += [model / "blobs"] + [model.parent / "blobs"] * model.name.startswith("models--")
        if not any(real.is_relative_to(place) for place in places):
            raise MxqError(f"{file} is a link out of the checkpoint's directory", "put the file itself there")
    return file


def weight_files(path: Path, names: Collection[str], where: str) -> list[str]:
    """Return the safetensors files that a checkpoint's tensors are in, as its index says if it has one.

    Args:
        path: the directory; of the files only the index needs to be there.
        names: the names of all files of the checkpoint.
        where: what an error calls the checkpoint.

    Raises:
        UsageError: there are no safetensors files.
        MxqError: the index is broken or leads out of the directory.
    """
    return [inside(path, file).name for file in _files(_weight_map(path, names, where)[0])]


def _files(weight_map: dict[str, str] | None) -> list[str]:
    return [SINGLE] if weight_map is None else sorted(set(weight_map.values()))


def _names(path: Path) -> set[str]:
    return {file.name for file in path.iterdir() if file.exists()}


def _header(file: Path, elsewhere: Elsewhere | None) -> tuple[dict[str, str], dict[str, TensorInfo]]:
    if elsewhere is None:
        return read_header(file)
    length = header_length(file, elsewhere.read(0, min(8, elsewhere.size)), elsewhere.size)
    return parse_header(file, elsewhere.read(8, length), elsewhere.size)


def _weight_map(path: Path, names: Collection[str], where: str) -> tuple[dict[str, str] | None, dict[str, Any] | None]:
    """Return the index's map of tensors to files and the whole index; None and None for a checkpoint of one file."""
    if INDEX not in names:
        if SINGLE in names:
            return None, None
        pickles = sorted(fnmatch.filter(names, "pytorch_model*.bin"))
        if pickles:
            raise UsageError(
                f"{where} holds its weights as {pickles[0]}, a pickle, which mxq never opens",
                "convert it to safetensors first (transformers: save_pretrained)",
            )
        raise UsageError(f"{where} holds neither {SINGLE} nor {INDEX}", "download the checkpoint's weights")
    file = inside(path, INDEX)
    index = read_json(file)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(value, str) for value in weight_map.values()):
        raise MxqError(f"{file} has no weight_map of tensors to files", "download it again")
    if not weight_map:
        raise MxqError(f"{file} names no tensor", "download it again")
    return weight_map, index


def _check_numbers(index: Path, files: Collection[str]) -> None:
    """Where files say how many they are, that many are named: a whole file left out leaves no other trace."""
    series = Counter((found[1], found[2]) for file in files if (found := _NUMBERED.fullmatch(file)))
    for (prefix, count), named in series.items():
        if named != int(count):
            raise MxqError(f"{index} names {named} of the {int(count)} files {prefix}*-of-{count}", "download it again")


def _check_index(index: Path, weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            raise MxqError(f"{index} says that {file} holds tensor {name}, but it does not", "download both again")
    for name, tensor in tensors.items():
        if name not in weight_map:
            raise MxqError(
                f"{tensor.file} holds tensor {name}, which {index.name} does not name", "download both again"
            )


def _read_into(file: Path, start: int, view: memoryview) -> None:
    """Fill ``view``. Plain reads, not a mapping: a file cut short meanwhile is an error and not a crash."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            done = 0
            while done < len(view):
                count = os.preadv(descriptor, [view[done : done + _READ_AT_ONCE]], start + done)
                if count == 0:
                    raise MxqError(f"{file} became shorter while it was read", "download it again")
                done += count
        finally:
            os.close(descriptor)
    except OSError as error:
        raise MxqError(f"{file} cannot be read: {error.strerror}") from None
