"""A directory that one process at a time works in, and that is gone when there was nothing to be left in it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from mxq import files
from mxq.errors import MxqError, UsageError

LOCK = ".lock"


@contextlib.contextmanager
def locked(work: Path, out: Path) -> Iterator[None]:
    """Make the directory ``work`` and lock it; remove it if in the end it holds nothing but the lock.

    Args:
        work: may be there.
        out: what the work is for, to name it.

    Raises:
        UsageError: another process works in it.
        MxqError: its file system has no locks.
        OSError: it cannot be made.
    """
    descriptor = None
    while descriptor is None:
        work.mkdir(exist_ok=True)
        descriptor = _locked_file(work / LOCK, out)
    try:
        files.sign(descriptor)
        yield
    finally:
        with contextlib.suppress(OSError):
            if [file.name for file in work.iterdir()] == [LOCK]:
                (work / LOCK).unlink()
                work.rmdir()
        os.close(descriptor)


def refuse_locked(work: Path, out: Path) -> None:
    """Raise as :func:`locked` if another process works in ``work``; changes nothing."""
    # For writing, without which NFS gives no lock.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), (work / LOCK).open("r+b") as stream:
        _lock(stream.fileno(), work, out)


def _locked_file(file: Path, out: Path) -> int | None:
    """Return a descriptor of the locked file; None if whoever held it has just removed it."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except FileNotFoundError:
        return None
    try:
        _lock(descriptor, file.parent, out)
        if os.path.samestat(os.fstat(descriptor), file.stat()):
            return descriptor
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _lock(descriptor: int, work: Path, out: Path) -> None:
    try:
        holder = files.lock(descriptor)
    except OSError as error:
        raise MxqError(
            f"{work} cannot be locked: {error.strerror}", "name an output on a file system that has locks"
        ) from None
    if holder is not None:
        raise UsageError(f"another process ({holder}) is converting into {out}", "wait for it, or name another output")
