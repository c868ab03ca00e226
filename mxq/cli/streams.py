"""Standard output and error as no verb can fail on: a reader may leave, and a character may be none of the terminal's.

A conversion of hours is not given up because nobody reads its progress any more, and `mxq verify OUT | head -1` ends
with verify's exit code.
"""

import io
import os
import sys
from pathlib import Path
from typing import Any, TextIO


class _Left(io.FileIO):
    """A file descriptor to write to. What is written after its reader has left is dropped.

    A full disk is an error once: what its buffer still holds when the process ends must not be another.
    """

    _failed = False

    def write(self, data: Any, /) -> int:
        if not self._failed:
            try:
                return super().write(data)
            except BrokenPipeError:
                pass
            except OSError as error:
                self._failed = True
                raise OSError(error.errno, error.strerror, _NAMES[self.fileno()]) from None
        return memoryview(data).nbytes


_NAMES = {1: "standard output", 2: "standard error"}


def prepare() -> None:
    """Replace this process's standard output and error; those that are not the process's own are left alone."""
    sys.stdout = _prepared(sys.stdout, 1)
    sys.stderr = _prepared(sys.stderr, 2)


def _prepared(stream: TextIO | None, number: int) -> TextIO:
    if stream is None:  # closed by who started us
        return Path(os.devnull).open("w", encoding="utf-8")
    try:
        if stream.fileno() != number:
            return stream
    except OSError:  # a test's, or a notebook's
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Left(number, "w", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.isatty() or number == 2,
    )
