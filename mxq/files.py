"""Files that are never half-written, their checksums, and a record of what made them."""

import contextlib
import errno
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from mxq import __version__

_CHUNK = 8 << 20
_COLUMNS = 160


@contextlib.contextmanager
def atomic_write(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary file beside ``path`` that takes its name only when the block ends without an error.

    Raises OSError, too, where something else than a file has the name: root would replace ``/dev/null`` by a file.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(fd, mode, encoding=None if "b" in mode else "utf-8") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes private files; what we publish gets the permissions any other new file would have.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically, with a final newline."""
    text = _indented(value, "\n")
    with atomic_write(path, "wb") as stream:
        stream.write(f"{text}\n".encode(errors="backslashreplace"))  # as JSON, too, writes bytes of no character


def _indented(value: Any, newline: str) -> str:
    """Return JSON in which what fits into a line is one: shorter to read, and most of it is made by compiled code."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(newline) + len(line) <= _COLUMNS or not isinstance(value, dict | list):
        return line
    inner = newline + "  "
    if isinstance(value, list):
        return "[" + ",".join(inner + _indented(part, inner) for part in value) + newline + "]"
    named = (f"{json.dumps(str(name), ensure_ascii=False)}: {_indented(part, inner)}" for name, part in value.items())
    return "{" + ",".join(inner + part for part in named) + newline + "}"


def lock(descriptor: int) -> str | None:
    """Lock an open lock file for this process; return None, or who holds it if another process does.

    The kernel drops the lock with the process, however it ends; so a lock file that is there means nothing.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
    return None


def sign(descriptor: int) -> None:
    """Write this process's id into the lock file that it holds."""
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())


def sha256_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_text(text: str) -> str:
    """Return the hexadecimal SHA-256 of ``text`` in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def versions(*packages: str) -> dict[str, str | None]:
    """Return the versions of mxq, Python and ``packages`` (None for one that is not installed)."""
    found: dict[str, str | None] = {"mxq": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def hardware() -> dict[str, Any]:
    """Return what ran the work, as far as it can be told without importing torch: processor, cores, memory, system."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    memory = None
    with contextlib.suppress(ValueError, OSError, AttributeError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": name, "cores": os.cpu_count(), "memory_bytes": memory, "system": platform.platform(terse=True)}


def command_line() -> list[str]:
    """Return the command that is running, with the program's name instead of its path."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


def size(count: int) -> str:
    """Return a number of bytes for people."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"
