"""A run by what people call it: a directory, or one of the recorded runs that come with mxq (``example:dense``).

``tools/record_examples.py`` made the recorded ones. Each is a run directory in an archive, which is unpacked for as
long as the process lives.
"""

import functools
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

from mxq import testbed
from mxq.errors import UsageError
from mxq.evaluate.reading import Run, read_run

PREFIX = "example:"
EXAMPLES = tuple(PREFIX + name for name in testbed.NAMES)

_ARCHIVES = Path(__file__).parent / "examples"


def read(spec: str) -> Run:
    """Read ``example:dense``, ``example:moe`` or the run directory ``spec``.

    Raises UsageError where there is none, MxqError where it is damaged.
    """
    if not spec.startswith(PREFIX):
        return read_run(Path(spec))
    if spec not in EXAMPLES:
        raise UsageError(f"there is no recorded run {spec!r}", f"use one of {', '.join(EXAMPLES)}, or a directory")
    return replace(read_run(_unpacked(spec.removeprefix(PREFIX))), name=spec)


def archive(spec: str) -> Path:
    """Return where the run of that name is packed."""
    return _ARCHIVES / f"{spec.removeprefix(PREFIX)}.zip"


@functools.cache
def _unpacked(name: str) -> Path:
    directory = Path(_temporary().name) / name
    with zipfile.ZipFile(archive(PREFIX + name)) as unpacking:
        unpacking.extractall(directory)
    return directory


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mxq-example-")  # removed when the process ends
