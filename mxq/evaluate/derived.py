"""Files that are made of a run after it was measured: JSON that can be thrown away and made again."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mxq import files
from mxq.errors import MxqError, UsageError
from mxq.evaluate.directory import read_json


def read_derived(path: Path, version: int, remove: str) -> dict[str, Any]:
    """Return what such a file holds, if it has the format ``version``; raises MxqError.

    ``remove`` says what to do with one that is damaged.
    """
    try:
        value = read_json(path)
    except MxqError as error:
        raise MxqError(error.message, remove) from None
    if value.get("format") != version:
        raise UsageError(f"{path} has format {value.get('format')!r:.40}", f"this mxq reads format {version}: {remove}")
    return value


def write_derived(path: Path, head: Mapping[str, Any], name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write ``head`` and, called ``name``, ``rows``, each in a line; whole or not at all. Raises MxqError."""
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    try:
        path.parent.mkdir(exist_ok=True)
        with files.atomic_write(path) as stream:
            stream.write(f'{json.dumps(head)[:-1]}, "{name}": [\n{lines}\n]}}\n')
    except OSError as error:
        raise MxqError(f"cannot write {path}: {error.strerror}", "make room and run the same command") from None


def refuse_unlike(path: Path, own: Mapping[str, Any], expected: Mapping[str, Any], named: Path, remove: str) -> None:
    """Raise MxqError unless a file's definition is the one expected, and the file is called like ``named``."""
    unlike = [key for key in expected if own.get(key) != expected[key]]
    if unlike or path.name != named.name:
        what = unlike[0] if unlike else "name"
        raise MxqError(f"{path} is of another run, or of other mxq: it has another {what}", remove)
