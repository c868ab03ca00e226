"""A directory that appears whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mxq.errors import InterruptedRunError, MxqError, UsageError


@contextlib.contextmanager
def staged(out: Path, needed: int) -> Iterator[Path]:
    """Yield a new directory beside ``out`` that takes its name when the block ends, and is removed if it fails.

    Args:
        out: must not exist, or be an empty directory.
        needed: bytes that will be written.

    Raises:
        UsageError: ``out`` holds something or has no parent.
        MxqError: the disk has no room, or writing failed.
        InterruptedRunError: the user stopped the work.
    """
    out = out.resolve()
    _check(out, needed)
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


def _check(out: Path, needed: int) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"the output {out} is a file", "name a directory that does not exist yet")
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"the output directory {out} is not empty", "name another, or empty it yourself")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}, where the output is to be, does not exist", "make it first")
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise MxqError(f"{out.parent} has {free / 1e9:.1f} GB free, the output needs {needed / 1e9:.1f} GB")
