"""Errors that a user sees: one line of what is wrong and where, one of what to do next, and an exit code.

::

    MxqError               1  the work failed
      UsageError           2  the request itself is wrong (arguments, recipe, prompt file)
      MismatchError        3  verification found a mismatch, or a comparison a regression
      InterruptedRunError  4  stopped by the user; what is on disk can be resumed

Anything else that escapes is a defect of mxq: the command line shows it as such, with a traceback under ``--debug``.
"""

import shlex


def quoted(*words: object) -> str:
    """Return words of a command, or a path, as a shell takes them: what a hint says is copied."""
    return shlex.join(map(str, words))


class MxqError(Exception):
    """The work failed for a reason outside mxq.

    ``message`` says what is wrong and where (name the file, tensor or key); ``hint`` says what to do next.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}; {self.hint}"


class UsageError(MxqError):
    """The request cannot be right: a bad argument, recipe or prompt file. Nothing was started."""

    exit_code = 2


class MismatchError(MxqError):
    """A check ran to its end and the answer is no."""

    exit_code = 3


class InterruptedRunError(MxqError):
    """Stopped by the user before the end; the same command continues it."""

    exit_code = 4
