"""A conversion's journal: what is being made of what, and which files of it are complete.

The first line says what is made; every other line is a complete shard with the errors of its matrices or, last, the
manifest's checksum. Lines are only ever added, each on the disk before the work goes on, so that whatever ends a
process, the lines that are whole are true; each has a checksum, so that one that was changed since is noticed.
"""

import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxq.checkpoint.headers import open_regular, parse_json
from mxq.errors import MxqError, UsageError, quoted

FORMAT = 1
_SHOWN_DIFFERENCES = 5
_FIRST = {"format": int, "conversion": dict}
_SHARD = {"shard": str, "bytes": int, "sha256": str, "layers": list}
_LAST = {"manifest": str}
_CHECK = "crc32"  # of the rest of a line; nothing else would tell that the measures in it changed


class Journal:
    """The journal of a conversion that this process may write.

    Attributes:
        shards: complete files by name: ``bytes``, ``sha256`` and ``layers``, their part of layers.jsonl.
        manifest: the SHA-256 of the manifest, if all was written and verified, else None.
    """

    def __init__(self, file: Path, conversion: dict[str, Any]) -> None:
        """Begin the journal of ``conversion`` in ``file``, or continue it.

        Raises:
            UsageError, MxqError: as :func:`refuse_unlike`.
        """
        lines, length = _lines(file)
        _refuse_unlike(file, lines, conversion)
        self._file = file
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self.shards: dict[str, dict[str, Any]] = {}
        self.manifest: str | None = None
        try:
            os.ftruncate(self._descriptor, length)  # of a line that was being written nothing is known
            if not lines:
                self.record({"format": FORMAT, "conversion": conversion})
        except BaseException:
            self.close()
            if not lines:
                file.unlink()
            raise
        for line in lines[1:]:
            self._take(line)

    def record(self, line: dict[str, Any]) -> None:
        """Add a line: ``shard`` with what :attr:`shards` holds of it, or ``manifest`` with its checksum."""
        text = json.dumps(line, allow_nan=False)
        check = json.dumps({_CHECK: _checksum(text)})
        rest = memoryview(f"{text[:-1]}, {check[1:]}\n".encode())
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._take(line)  # first, because Ctrl-C while the disk is busy leaves a line that is whole
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _take(self, line: dict[str, Any]) -> None:
        if "shard" in line:
            self.shards[line["shard"]] = {name: line[name] for name in ("bytes", "sha256", "layers")}
        elif "manifest" in line:
            self.manifest = line["manifest"]


def refuse_unlike(file: Path, conversion: dict[str, Any]) -> None:
    """Raise UsageError if ``file`` is the journal of another conversion, MxqError if it is damaged.

    Compared is what ``conversion`` names, which may be a part.
    """
    _refuse_unlike(file, _lines(file)[0], conversion)


def _refuse_unlike(file: Path, lines: list[dict[str, Any]], conversion: dict[str, Any]) -> None:
    if not lines:
        return
    there = lines[0]["conversion"]
    differing = differences({name: there.get(name) for name in conversion}, json.loads(json.dumps(conversion)))
    if differing:
        more = len(differing) - _SHOWN_DIFFERENCES
        said = [*differing[:_SHOWN_DIFFERENCES], *([f"and {more} more"] if more > 0 else [])]
        hint = f"name another output, or delete {quoted(file.parent)} to start over"
        if found := re.match(r"source\.commit is ([0-9a-f]{40}) there", next(iter(differing))):  # a branch has moved
            hint = f"give {there['source'].get('name')}@{found[1]} to continue, or {hint}"
        raise UsageError(f"{file.parent} is of another conversion: {'; '.join(said)}", hint)


def differences(there: Any, here: Any, name: str = "") -> list[str]:
    """Return in words where two descriptions differ: ``recipe.scale_rule is even there, ceil now``."""
    if isinstance(there, dict) and isinstance(here, dict):
        return [
            said
            for key in dict.fromkeys([*there, *here])
            for said in differences(there.get(key), here.get(key), f"{name}.{key}".removeprefix("."))
        ]
    if there == here:
        return []
    if isinstance(there, dict | list) or isinstance(here, dict | list) or name.endswith("fingerprint"):
        return [f"{name} differs"]
    return [f"{name} is {there} there, {here} now"]


def conversion(file: Path) -> dict[str, Any] | None:
    """Return what ``file`` says is made; None if it says nothing yet."""
    lines, _ = _lines(file)
    return lines[0]["conversion"] if lines else None


def begun(file: Path) -> bool:
    """Tell whether ``file`` says at least what is made."""
    return bool(_lines(file)[0])


def recorded(file: Path) -> bool:
    """Tell whether ``file`` says of anything that it is complete."""
    return len(_lines(file)[0]) > 1


def published(file: Path) -> str | None:
    """Return the SHA-256 of the manifest if ``file`` is the journal of a conversion of which all is done."""
    lines, _ = _lines(file)
    done: str | None = lines[-1].get("manifest") if lines else None
    return done


def _lines(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of a journal that are whole, and their length in bytes; none if it is not there."""
    try:
        with open_regular(file) as stream:
            content = stream.read()
    except FileNotFoundError:
        return [], 0
    whole = content[: content.rfind(b"\n") + 1]
    try:
        lines = [parse_json(line, str(file)) for line in whole.splitlines()]
    except MxqError:
        lines = [{}]
    if lines and lines[0].get("format", FORMAT) != FORMAT:
        raise UsageError(
            f"{file} has format {lines[0]['format']!r}, and this mxq writes {FORMAT}",
            f"continue with the mxq that began it, or delete {quoted(file.parent)} to start over",
        )
    unchanged = all(line.pop(_CHECK, None) == _checksum(json.dumps(line)) for line in lines)
    first, others = all(_holds(line, _FIRST) for line in lines[:1]), lines[1:]
    if not (unchanged and first and all(_holds(line, _SHARD) or _holds(line, _LAST) for line in others)):
        raise MxqError(f"{file} is damaged", f"delete {quoted(file.parent)} to start over, or name another output")
    return lines, len(whole)


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _holds(line: dict[str, Any], kinds: Mapping[str, type]) -> bool:
    return all(isinstance(line.get(name), kind) for name, kind in kinds.items())
