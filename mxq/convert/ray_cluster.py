"""The nodes of an existing Ray cluster make the files of a conversion, over a file system that all of them share.

A file is a task. Each attempt at it writes under a name of its own, beside the files that are complete, and takes its
place among them only when the node has said that it is done. So whatever a node does that was taken for dead, or that a
killed process had sent to work, it never touches a complete file, and the journal stays with the process that began.

Ray moves tasks and answers by pickling. That is between machines that already run each other's code; nothing of a
checkpoint is pickled.
"""

import contextlib
import logging
import os
import signal
import socket
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxq.checkpoint.identity import fingerprint
from mxq.convert import ray_worker
from mxq.convert.executors import Done, Executor
from mxq.convert.partial import Partial
from mxq.convert.work import Work
from mxq.errors import MxqError, UsageError
from mxq.progress import Advance, note

_MOST_JOBS = 16  # as on one machine
_ATTEMPTS = 3
_LOOK_EVERY_S = 5.0
_PATIENCE_S = 10.0
_START = "start one with `ray start --head`, and `ray start --address HOST:PORT` on the other nodes"


@contextlib.contextmanager
def connected(address: str | None, jobs: int | None) -> Iterator[Executor]:
    """Connect to a cluster that is there, and yield what makes files on it.

    Args:
        address: ``HOST:PORT``; None for ``RAY_ADDRESS``, or the cluster that this machine is a node of.
        jobs: CPUs and threads for each file; None for as many as the smallest node has, at most 16.

    Raises:
        UsageError: Ray is not installed, there is no such cluster, or no node of it has as many CPUs.
    """
    try:
        import ray
    except ImportError:
        raise UsageError("--executor ray needs Ray, which is not installed", "pip install 'mxq[ray]'") from None
    place = _place(address)
    before = signal.getsignal(signal.SIGTERM)
    # Ray prints what happens to nodes to stdout, where only results belong.
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            ray.init(address=place, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UsageError(f"the Ray cluster at {place} cannot be used: {_line(error)}", _START) from None
        finally:
            if signal.getsignal(signal.SIGTERM) is not before:
                signal.signal(signal.SIGTERM, before)  # which keeps what is complete; Ray's own does not
        try:
            yield _Cluster(ray, jobs)
        finally:
            # Ends what is under way. ray.cancel would abort this process if a task is done at that moment (Ray 2.60).
            ray.shutdown()


def _place(address: str | None) -> str:
    """Return the address of a cluster that answers; Ray would try for minutes, or start a cluster itself."""
    from ray._private.services import get_ray_address_from_environment

    try:
        place: str = address or get_ray_address_from_environment("auto", None)
    except ConnectionError:
        raise UsageError("there is no Ray cluster here", f"{_START}; or name one with --ray-address") from None
    host, _, port = place.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise UsageError(f"{place} is not the address of a Ray cluster", "give it as HOST:PORT, from one of its nodes")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PATIENCE_S).close()
    except (OSError, OverflowError) as error:
        raise UsageError(f"no Ray cluster answers at {place}: {error}", _START) from None
    return place


@dataclass(frozen=True)
class _Attempt:
    work: Work
    file: Path


class _Cluster:
    """Makes files on a cluster, as :data:`mxq.convert.executors.Executor`."""

    def __init__(self, ray: Any, jobs: int | None) -> None:
        self._ray = ray
        cpus = self._cpus()
        self._jobs = jobs or min(_MOST_JOBS, *cpus)
        if not any(count >= self._jobs for count in cpus):
            raise UsageError(
                f"no node of the Ray cluster has {self._jobs} CPUs, the largest has {max(cpus)}", "ask for fewer --jobs"
            )
        options = {"num_cpus": self._jobs, "max_retries": 0, "scheduling_strategy": "SPREAD"}
        self._remote = ray.remote(_task()).options(**options)
        self._code = ray_worker.code()

    def __call__(self, works: Sequence[Work], partial: Partial, advance: Advance) -> Generator[Done, None, None]:
        if not works:
            return
        source = fingerprint(works[0].source)
        left, lost = deque(works), Counter[str]()
        running: dict[Any, _Attempt] = {}
        while left or running:
            most = self._at_once()  # also when nothing is left to begin: what waits for a node may wait in vain
            while left and len(running) < most:
                attempt = _Attempt(left[0], partial.attempt(left[0].shard.file))
                running[self._begin(attempt, source)] = attempt
                left.popleft()
            ready, _ = self._ray.wait(list(running), timeout=_LOOK_EVERY_S)
            for reference in ready:
                attempt = running.pop(reference)
                work, name = attempt.work, attempt.work.shard.file
                try:
                    answer = self._ray.get(reference)
                except self._ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                except self._ray.exceptions.RayError as error:
                    attempt.file.unlink(missing_ok=True)
                    lost[name] += 1
                    if lost[name] == _ATTEMPTS:
                        raise MxqError(f"{name} was lost {_ATTEMPTS} times: {_line(error)}", "see Ray's logs") from None
                    note(f"{name} was lost and is converted again: {_line(error)}")
                    left.appendleft(work)
                    continue
                checksum, layers = self._take(answer, attempt)
                partial.adopt(attempt.file, name)
                advance(work.bytes_before)
                yield work, checksum, layers

    def _begin(self, attempt: _Attempt, source: str) -> Any:
        order = ray_worker.Order.of(attempt.work, source, attempt.file, self._jobs)
        return self._remote.remote(self._code, [self._ray.put(order)])

    def _take(self, answer: dict[str, Any], attempt: _Attempt) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        names = {node["NodeID"]: node["NodeName"] for node in self._ray.nodes()}
        node = names.get(answer["node"], answer["node"])
        ray_worker.raise_(answer, node)
        checksum, layers = answer["checksum"], answer["layers"]
        try:
            there = attempt.file.stat().st_size
        except FileNotFoundError:
            there = None
        if there != checksum["bytes"]:
            raise MxqError(f"{attempt.file}, which node {node} wrote, is not here", ray_worker.SHARED)
        return checksum, layers

    def _at_once(self) -> int:
        """Return how many tasks to have under way: as many as there is room for, and one that waits."""
        room = sum(count // self._jobs for count in self._cpus())
        if not room:
            raise MxqError(f"no node of the Ray cluster has {self._jobs} CPUs any more", "start nodes and run it again")
        return room + 1

    def _cpus(self) -> list[int]:
        """Return how many CPUs the nodes have that have any."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        cpus = [int(node["Resources"].get("CPU", 0)) for node in nodes]
        if not any(cpus):
            raise MxqError("no node of the Ray cluster has a CPU", "start nodes with CPUs")
        return [count for count in cpus if count]


def _task() -> Any:
    def convert(code: str, order: list[Any]) -> dict[str, Any]:
        # Pickled as a whole, for a function that is local, so that it runs where there is another mxq, or none.
        import ray

        context = ray.get_runtime_context()
        answer: dict[str, Any]
        try:
            from mxq.convert import ray_worker
        except ImportError as error:
            answer = {"failed": "mxq", "what": f"mxq cannot be imported: {error}", "hint": "install it on every node"}
        else:
            there = ray_worker.code()
            if there == code:
                answer = ray_worker.make(ray.get(order[0]))
            else:
                what = f"mxq is {there} there, {code} here"
                answer = {"failed": "mxq", "what": what, "hint": "install the same on every node"}
        return answer | {"node": context.get_node_id()}

    return convert


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].partition(". ")[0].rstrip(".")
