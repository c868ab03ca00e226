"""mxq_manifest.json as it is read, and the checksums in it; :mod:`mxq.convert.manifest` makes it."""

from pathlib import Path
from typing import Any

from mxq.checkpoint.beside import MANIFEST
from mxq.checkpoint.headers import read_json
from mxq.checkpoint.reader import inside
from mxq.errors import MxqError
from mxq.files import sha256_file
from mxq.progress import progress

FORMAT = 1


def read(path: Path) -> dict[str, Any] | None:
    """Return the manifest of a checkpoint's directory, None if it has none.

    Raises:
        MxqError: it is not one that this version reads.
    """
    file = inside(path, MANIFEST)
    if not file.exists():
        return None
    manifest = read_json(file)
    if manifest.get("format") != FORMAT:
        raise MxqError(
            f"{file} is of format {manifest.get('format')!r}; this mxq reads {FORMAT}", "use the mxq it names"
        )
    return manifest


def checksums(files: list[Path]) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of each file, by its name."""
    found: dict[str, dict[str, Any]] = {}
    with progress("checksums", sum(file.stat().st_size for file in files), "B") as advance:
        for file in files:
            found[file.name] = checksum(file)
            advance(found[file.name]["bytes"])
    return found


def checksum(file: Path) -> dict[str, Any]:
    """Return the size and SHA-256 of a file."""
    return {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
