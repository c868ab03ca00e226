"""A directory that appears whole or not at all."""

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mxq.errors import InterruptedRunError, MxqError, UsageError
from mxq.files import size
from mxq.progress import note


@contextlib.contextmanager
def staged(out: Path, needed: int) -> Iterator[Path]:
    """Yield a new directory beside ``out`` that takes its name when the block ends, and is removed if it fails.

    Args:
        out: must not exist, or be an empty directory.
        needed: bytes that will be written.

    Raises:
        UsageError: ``out`` holds something, is a mount point or has no parent.
        MxqError: the disk has no room, or writing failed.
        InterruptedRunError: the user stopped the work.
    """
    out = out.resolve()
    check(out, needed)
    _say_what_is_left(out)
    work = Path(tempfile.mkdtemp(prefix=f"{out.name}.partial-", dir=out.parent))
    try:
        umask = os.umask(0)
        os.umask(umask)
        work.chmod(0o777 & ~umask)
        yield work
        work.rename(out)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, KeyboardInterrupt):
            raise InterruptedRunError(
                f"interrupted; {out} was not written", "run the same command again to start over"
            ) from None
        if isinstance(error, OSError):
            raise MxqError(f"writing {out} failed: {error.strerror or error}", "nothing was left behind") from error
        raise


def check(out: Path, needed: int) -> None:
    """Raise what :func:`staged` would raise before any work, for ``needed`` bytes to be written to ``out``."""
    out = out.resolve()
    if out.exists() and not out.is_dir():
        raise UsageError(f"the output {out} is a file", "name a directory that does not exist yet")
    if out.is_mount():
        raise UsageError(
            f"the output {out} is a mount point, which nothing can take the place of", "name a new directory inside it"
        )
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"the output directory {out} is not empty", "name another, or empty it yourself")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}, where the output is to be, does not exist", "make it first")
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise MxqError(
            f"{out.parent} has {size(free)} free, the output needs {size(needed)}",
            "make room, or name a directory on another disk",
        )


def _say_what_is_left(out: Path) -> None:
    """Note what a run that was killed could not remove; it may also be of a run still going on, so it stays."""
    for left in sorted(out.parent.glob(f"{glob.escape(out.name)}.partial-*")):
        note(f"left over: {left}, unless another run is writing it now; mxq does not read it, so you can remove it")
