"""Downloads by the hub's library that report how far they are, and that Ctrl-C stops."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mxq.progress import Advance, note

T = TypeVar("T")

# Of the library's bars, for files, bytes from the network and bytes on the disk, those of the last kind count.
_COUNTED = ("huggingface_hub.snapshot_download", "huggingface_hub.http_get", "huggingface_hub.xet_get")


class Bars:
    """What the hub's library takes for progress bars: shows nothing itself, passes bytes on, and can stop it."""

    def __init__(self, advance: Advance | None = None) -> None:
        self._advance = advance
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Make every download fail at its next piece."""
        self._stopped.set()
        with contextlib.suppress(ImportError):
            from huggingface_hub.utils._xet import abort_xet_session

            abort_xet_session()

    def update(self, count: float, of_bytes: bool) -> None:
        """Count what has arrived."""
        # Xet, which is aborted, calls from a thread that is not Python's own and prints what is raised in it.
        if self._stopped.is_set() and not isinstance(threading.current_thread(), threading._DummyThread):
            raise InterruptedError("the download was stopped")
        if of_bytes and self._advance is not None:
            with self._lock:
                self._advance(count)

    def kind(self) -> Any:
        """Return the class of the bars."""
        from huggingface_hub.utils import tqdm

        update = self.update

        class Bar(tqdm):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self._of_bytes = kwargs.get("name") in _COUNTED
                super().__init__(*args, **{**kwargs, "disable": True})

            def update(self, n: float | None = 1) -> None:
                update(n or 0, self._of_bytes)

        return Bar


def stoppable(call: Callable[[Bars], T], advance: Advance, stopping: str) -> T:
    """Return what ``call`` returns, a download with these bars; Ctrl-C stops it at the next piece.

    Args:
        call: is called in another thread.
        advance: told the bytes that arrive.
        stopping: what is said on Ctrl-C, because the end can take a moment.
    """
    bars = Bars(advance)
    with ThreadPoolExecutor(1) as pool:
        # In a thread, because the hub's own threads go on to the end of their files, and only we can stop them.
        future = pool.submit(call, bars)
        try:
            return future.result()
        except KeyboardInterrupt:
            note(stopping)
            bars.stop()
            raise
