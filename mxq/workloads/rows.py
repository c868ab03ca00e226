"""Rows of JSON objects from files that nobody vouches for: JSON lines, plain or gzipped, one JSON array, Parquet."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mxq import files
from mxq.errors import UsageError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")

_ONE_OBJECT = "every line must be one JSON object"
_MOST_BYTES = 1 << 28
"""Of a file and of what is packed in it: prompt sets have a few megabytes."""

Located = tuple[str, dict[str, Any]]
"""A row behind the words that say where it is."""


def read_rows(path: Path) -> list[Located]:
    """Return the rows of a file whose suffix says what it is.

    Raises UsageError naming file and row for what cannot be read.
    """
    if path.name.endswith(".parquet"):
        return _parquet(path)
    text = _text(path)
    if path.name.endswith(".json") and text.lstrip().startswith("["):
        rows = [(f"{path}, row {number}", row) for number, row in enumerate(_loads(text, str(path)), start=1)]
        return [(where, _object(row, where)) for where, row in rows]
    lines = [(f"{path}, line {number}", line) for number, line in numbered(text)]
    return [(where, parse_line(line, where)) for where, line in lines]


def read_text(path: Path) -> str:
    """Return the text of a file, plain or of JSON lines; raises UsageError where it is too large, or not UTF-8."""
    return _decoded(path, _bytes(path))


def numbered(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a JSON lines file that are not empty, each with its number."""
    # Not splitlines(): JSON strings may hold U+2028 and the like unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line


def parse_line(line: str, where: str) -> dict[str, Any]:
    """Return the object on a line; raises UsageError beginning with ``where``."""
    return _object(_loads(line, where), where)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: {type(value).__name__} instead of an object", 'write {"prompt": "..."}')
    return value


def _loads(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON ({error.msg} at column {error.colno})", _ONE_OBJECT) from None
    except (ValueError, RecursionError) as error:  # ValueError: Python reads no integers of thousands of digits
        reason = "too deep" if isinstance(error, RecursionError) else "a number has too many digits"
        raise UsageError(f"{where}: not JSON ({reason})", _ONE_OBJECT) from None


def _text(path: Path) -> str:
    content = _bytes(path)
    if not path.name.endswith(".gz"):
        return _decoded(path, content)
    unpack = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        unpacked = unpack.decompress(content, _MOST_BYTES + 1)
    except zlib.error as error:
        raise UsageError(f"cannot read {path}: {error}", "it must be gzip: fetch it again") from None
    _check_size(path, len(unpacked))
    if not unpack.eof:
        raise UsageError(f"cannot read {path}: it ends early", "fetch it again")
    return _decoded(path, unpacked)


def _bytes(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise UsageError(f"{path} is {_kind(path)}", "give a file of prompts")
        _check_size(path, path.stat().st_size)
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "give a file that can be read") from None


def _kind(path: Path) -> str:
    return "a directory" if path.is_dir() else "no regular file" if path.exists() else "not there"


def _check_size(path: Path, size: int) -> None:
    if size > _MOST_BYTES:
        raise UsageError(
            f"{path} holds more than {files.size(_MOST_BYTES)}", "that is no prompt set: give the split's own file"
        )


def _decoded(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read {path}: {error}", "it must be text or JSON lines in UTF-8") from None


def _parquet(path: Path) -> list[Located]:
    content = _bytes(path)
    if content.startswith(b"version https://git-lfs"):
        raise UsageError(f"{path} is a pointer of Git LFS, not the file", "run `git lfs pull` there")
    try:
        from pyarrow import ArrowException, BufferReader, parquet
    except ImportError:
        raise UsageError(
            f"{path} is Parquet, which pyarrow reads, and it is not installed",
            "pip install 'mxq[datasets]', or give the rows as JSON lines",
        ) from None
    rows: list[dict[str, Any]] = []
    unpacked = 0
    try:
        table = parquet.ParquetFile(BufferReader(content))
        groups = (table.metadata.row_group(number) for number in range(table.num_row_groups))
        _check_size(path, sum(group.total_byte_size for group in groups))
        # Row by row: a dictionary lets a small file hold one long text as often as it likes.
        for batch in table.iter_batches(batch_size=1):
            unpacked += batch.nbytes
            _check_size(path, unpacked)
            rows += batch.to_pylist()
    except (ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise UsageError(f"cannot read {path}: {reason}", "it must be Parquet: fetch it again") from None
    return [(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1)]
