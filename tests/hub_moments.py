"""Moments of a conversion with ``--stream``, for processes that may not have loaded the hub's library yet."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hub_runner import small_pieces
from killing import at, kill, patch

from mxq.checkpoint.hub_bars import Bars
from mxq.checkpoint.hub_shards import Shards


def in_a_download(count: int, act: Callable[[], None] = kill) -> None:
    """Kill, or do something else, in the middle of the ``count``-th download."""
    now, fetch, update = at(count), Shards.fetch, Bars.update
    reached = []

    def fetching(shards: Shards, name: str, *rest: Any) -> None:
        if now():
            reached.append(name)
        fetch(shards, name, *rest)

    def updated(bars: Bars, number: float, of_bytes: bool) -> None:
        if reached and of_bytes and number:
            reached.clear()
            act()
        update(bars, number, of_bytes)

    patch(Shards, "fetch", fetching)
    patch(Bars, "update", updated)
    small_pieces()


def before_removing(count: int) -> None:
    """Kill when a file of the source is about to be removed."""
    now, unlink = at(count), Path.unlink

    def killed(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "source" and path.exists() and now():
            kill()
        unlink(path, missing_ok)

    patch(Path, "unlink", killed)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
