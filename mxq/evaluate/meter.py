"""How far an evaluation on servers is, in lines on stderr: few, since processors that draw a bar are measured too."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mxq.progress import note

_LINE_EVERY_S = 10.0


class Meter:
    """Counts requests of all cells, and estimates how long the rest takes.

    Requests are taken to need as long as those so far, and servers to start as slowly; ``places`` work side by side.

    Attributes:
        servers_left: how many servers are still to be started.
    """

    def __init__(self, requests: int, servers: int, places: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.servers_left = servers
        self._total, self._places, self._clock = requests, places, clock
        self._lock = threading.Lock()
        self._done = 0
        self._measuring_s = self._starting_s = 0.0
        self._started = 0
        self._since: list[float] = []
        self._begin = self._shown = clock()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Time the measuring of a cell."""
        begin = self._clock()
        with self._lock:
            self._since.append(begin)
        try:
            yield
        finally:
            with self._lock:
                self._since.remove(begin)
                self._measuring_s += self._clock() - begin

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Time the start of a server."""
        begin = self._clock()
        yield
        with self._lock:
            self._starting_s += self._clock() - begin
            self._started += 1
            self.servers_left = max(self.servers_left - 1, 0)

    def advance(self, amount: int, title: str) -> None:
        """Count requests; those of a cell that is to be measured again are taken back."""
        with self._lock:
            self._done += amount
            now = self._clock()
            if amount > 0 and (now - self._shown >= _LINE_EVERY_S or self._done == self._total):
                self._shown = now
                done = f"{self._done / self._total:4.0%} ({self._done}/{self._total} requests)"
                note(f"{title}: {done}, {now - self._begin:.0f} s, about {self._left(now):.0f} s left")

    def _left(self, now: float) -> float:
        measuring = self._measuring_s + sum(now - since for since in self._since)
        requests = measuring / max(self._done, 1) * (self._total - self._done)
        starts = self._starting_s / max(self._started, 1) * self.servers_left
        return (requests + starts) / self._places
