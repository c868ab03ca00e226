"""The safetensors header: eight bytes of length, a JSON table of tensors, then their bytes.

The checks are those the format asks for (tensors lie end to end, from the first byte after the header to the last of
the file) and those that keep a header from doing harm (size, depth, duplicate names, numbers that are none). What
passes, safetensors' own reader reads alike. Of what that reads, refused here are: an entry with keys of its own, a
name that is there twice or cannot be printed, a shape that torch cannot have, and types of which no Qwen3.5 model has
any.
"""

import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mxq.errors import MxqError

if TYPE_CHECKING:
    import torch

_TYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "F64": ("float64", 8),
}
SIZES = {name: size for name, (_, size) in _TYPES.items()}
"""Type names of safetensors -> bytes of an element."""
_PACKED = ("F4", "F6_E2M3", "F6_E3M2")


class _TorchTypes(Mapping[str, "torch.dtype"]):
    """Imports torch when a type is asked for: headers alone are read without, in a tenth of the time."""

    def __getitem__(self, name: str) -> "torch.dtype":
        import torch

        found: torch.dtype = getattr(torch, _TYPES[name][0])
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(_TYPES)

    def __len__(self) -> int:
        return len(_TYPES)


DTYPES = _TorchTypes()
"""Type names of safetensors -> torch."""

MAX_HEADER = 100_000_000
"""Longest header that the safetensors library reads, in bytes; no JSON file beside the weights is longer either."""

_MAX_AXES = 64  # that torch computes with
_MAX_DIGITS = 40  # twice as many as any number has here
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: bytes ``start`` to ``end`` of ``file``, counted from the file's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.end - self.start


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size in bytes of a tensor of a safetensors type."""
    return math.prod(shape) * SIZES[dtype]


def read_header(file: Path) -> tuple[dict[str, str], dict[str, TensorInfo]]:
    """Return a safetensors file's metadata and tensors, having checked every claim of the header against the file.

    Raises:
        MxqError: the file is missing, truncated, or its header lies or is not one.
    """
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = header_length(file, stream.read(8), size)
            text = stream.read(length)
    except FileNotFoundError:
        raise MxqError(f"{file} is missing", "download the checkpoint again") from None
    except OSError as error:
        raise MxqError(f"{file} cannot be read: {error.strerror}", "see what it is, and who may read it") from None
    return parse_header(file, text, size)


def open_regular(file: Path) -> IO[bytes]:
    """Open a file for reading, which waits for nothing and does nothing: it must not be a pipe, device or directory.

    Raises:
        MxqError: it is.
        OSError: it cannot be opened.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise MxqError(f"{file} is not a file", "put the file itself there")
    # Without waiting, lest it has become a pipe since.
    return os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb")


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a file as :func:`parse_json`.

    Raises:
        FileNotFoundError: there is none.
        MxqError: it cannot be read, is larger than any such file, or as :func:`parse_json`.
    """
    try:
        with open_regular(file) as stream:
            if os.fstat(stream.fileno()).st_size > MAX_HEADER:
                raise MxqError(f"{file} has more than {MAX_HEADER} bytes, which no such file needs", "get it again")
            text = stream.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise MxqError(f"{file} cannot be read: {error.strerror}", "see what it is, and who may read it") from None
    return parse_json(text, str(file))


def header_length(file: Path, prefix: bytes, size: int) -> int:
    """Return the length of the header of a file of ``size`` bytes that begins with ``prefix``, its first eight.

    Raises:
        MxqError: no header of that length can be there.
    """
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or 8 + length > size:
        raise _broken(file, f"it has {size} bytes, its header alone claims {8 + length}", truncated=True)
    if length > MAX_HEADER:
        raise _broken(file, f"its header claims {length} bytes, more than the {MAX_HEADER} the format allows")
    return length


def encode_header(header: dict[str, Any]) -> bytes:
    """Return what a file begins with: the length of ``header`` and its JSON, padded to a multiple of eight bytes."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def parse_json(text: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object, in UTF-8, as other readers would understand it too.

    No key occurs twice or holds what cannot be printed, no text half of a surrogate pair; no number is NaN, infinite
    or endless.

    Raises:
        MxqError: ``what`` is not such an object.
    """
    try:
        value = json.loads(
            text.decode(), object_pairs_hook=_unique, parse_constant=_number, parse_float=_number, parse_int=_whole
        )
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise MxqError(f"{what} is not valid JSON: {error}", "download it again") from None
    if not isinstance(value, dict):
        raise MxqError(f"{what} holds no JSON object", "download it again")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r:.60} occurs twice")
    if not "".join(keys).isprintable():
        raise ValueError(f"the key {next(key for key in keys if not key.isprintable())!r:.60} cannot be printed")
    return keys


def _number(text: str) -> float:
    if text in ("NaN", "Infinity", "-Infinity") or not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.20} is no number")
    return value


def _whole(text: str) -> int:
    if len(text) > _MAX_DIGITS or text == "-0":  # which other readers take for a float
        raise ValueError(f"{text:.20} is no whole number")
    return int(text)


def parse_header(file: Path, text: bytes, size: int) -> tuple[dict[str, str], dict[str, TensorInfo]]:
    """Return metadata and tensors as :func:`read_header`, of a file of ``size`` bytes whose header is ``text``.

    Raises:
        MxqError: the header lies or is not one.
    """
    data_start = 8 + len(text)
    header = parse_json(text, f"the header of {file}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken(file, "its metadata is not a table of strings")
    tensors = {name: _tensor(file, name, entry, data_start) for name, entry in header.items()}
    expected = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != expected:
            what = "overlaps another" if tensor.start < expected else "leaves a gap before it"
            raise _broken(file, f"tensor {tensor.name} at byte {tensor.start} {what}")
        expected = tensor.end
    if expected != size:
        raise _broken(file, f"it has {size} bytes, its header claims {expected}", truncated=size < expected)
    return metadata, tensors


def _tensor(file: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _broken(file, f"the entry of tensor {name} is not dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype in _PACKED:
        raise MxqError(
            f"{file}: tensor {name} is {dtype}, elements smaller than a byte, which mxq reads as bytes only",
            "save tensor.view(torch.uint8) instead",
        )
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise _broken(file, f"tensor {name} is of unknown type {dtype!r:.60}")
    if not _naturals(shape) or len(shape) > _MAX_AXES or not _naturals(offsets) or len(offsets) != 2:
        raise _broken(file, f"tensor {name} has shape {shape!r:.60} and offsets {offsets!r:.60}")
    if math.prod(filter(None, shape)) >> 60:  # what of it is empty does not matter: torch multiplies as well
        raise _broken(file, f"tensor {name}, {dtype} {shape!r:.60}, needs more bytes than a file can have")
    start, end = offsets
    expected = nbytes(dtype, tuple(shape))
    if end - start != expected:
        raise _broken(file, f"tensor {name}, {dtype} {shape!r:.60}, needs {expected} bytes but claims {start} to {end}")
    return TensorInfo(name, dtype, tuple(shape), file, data_start + start, data_start + end)


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _broken(file: Path, why: str, truncated: bool = False) -> MxqError:
    return MxqError(
        f"{file} is {'truncated' if truncated else 'not a valid safetensors file'}: {why}", "download it again"
    )
