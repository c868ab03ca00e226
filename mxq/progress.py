"""Progress on stderr: a live bar in a terminal, one line every few seconds elsewhere, silence with ``--quiet``."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Protocol

_LINE_EVERY_S = 10.0
_MOST_SHOWN = 2000
_quiet = False


class Advance(Protocol):
    """What moves a bar."""

    def __call__(self, amount: float, title: str | None = None) -> None:
        """Add the amount done since the last call, in the unit the bar was opened with; ``title`` renames the bar."""


def set_quiet(quiet: bool) -> None:
    """Turn all progress and notes off or on for this process."""
    global _quiet
    _quiet = quiet


def note(message: str) -> None:
    """Say something in passing, on stderr."""
    if not _quiet:
        print(printable(message), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Return ``text`` on one line of at most 2000 characters, without those that would do something to a terminal."""
    if len(text) > _MOST_SHOWN:
        text = f"{text[:_MOST_SHOWN]}..."
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


@contextlib.contextmanager
def progress(title: str, total: float, unit: str = "") -> Iterator[Advance]:
    """Show how much of ``total`` is done; ``unit`` is "B" for bytes, else a word such as "requests"."""
    if _quiet or total <= 0:
        yield lambda amount, title=None: None
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _bar(title, total, unit) as advance:
            yield advance
    else:
        yield _Lines(title, total, unit)


@contextlib.contextmanager
def _bar(title: str, total: float, unit: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amount = (DownloadColumn(), TransferSpeedColumn()) if unit == "B" else (MofNCompleteColumn(), TextColumn(unit))
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total)

        def advance(amount: float, title: str | None = None) -> None:
            bar.update(task, advance=amount, description=title)

        yield advance


class _Lines:
    """Progress for logs and pipes."""

    def __init__(self, title: str, total: float, unit: str) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._done = 0.0
        self._started = self._shown = time.monotonic()

    def __call__(self, amount: float, title: str | None = None) -> None:
        self._done += amount
        self._title = title or self._title
        now = time.monotonic()
        if now - self._shown >= _LINE_EVERY_S or self._done >= self._total:
            self._shown = now
            self._show(now - self._started)

    def _show(self, elapsed: float) -> None:
        share = self._done / self._total
        left = elapsed * (1 - share) / share if share else 0.0
        if self._unit == "B":
            scale, unit = (1e9, "GB") if self._total >= 1e9 else (1e6, "MB")
            done, total = self._done / scale, self._total / scale
            amount = f"{done:.1f}/{total:.1f} {unit}, {done / max(elapsed, 1e-9):.2f} {unit}/s"
        else:
            amount = f"{self._done:g}/{self._total:g} {self._unit}"
        note(f"{self._title}: {share:4.0%} ({amount}), {elapsed:.0f} s, {left:.0f} s left")
