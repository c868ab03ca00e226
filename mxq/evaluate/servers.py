"""Running a plan on vLLM servers, unattended: arm by arm, repeat by repeat, over crashes and interruptions.

::

    for every repeat                    so that a machine that drifts does so for all arms alike
      for every arm                     each target's plain arm first; another one begins with each repeat
        its server, started once        kept for the next repeat, and started with others, where there is room
          for every workload
            for every concurrency       ascending
              warm-up, counters, all prompts, counters, checks, records written

Where there are several places for servers (``--gpus``), each takes the next arm that is waiting, side by side with the
others; that they share a machine is noted in every cell.

A server that is lost in a cell is started again once, and the cell measured from its start: nothing of the first try
is kept but that there was one. Lost again in the same cell, the run ends. What is finished stays, and the same command
goes on from there.
"""

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from mxq import files
from mxq.engines.process import ServerError
from mxq.errors import InterruptedRunError, MxqError
from mxq.evaluate.directory import OpenCell, open_run, refuse_foreign
from mxq.evaluate.fleet import Fleet, Server, Servers
from mxq.evaluate.matrix import VLLM, Arm, Place, Plan, TokenizedWorkload
from mxq.evaluate.meter import Meter
from mxq.evaluate.near_ties import differences, near_ties, reference
from mxq.evaluate.prepare import Request, prepare
from mxq.evaluate.reading import Run, read_run
from mxq.evaluate.served_cell import measure_cell
from mxq.evaluate.tasks import Asked, ask_tasks, check_asked, load_tasks
from mxq.progress import note
from mxq.workloads import ChatTemplate

SEMANTICS = 1
"""Raised when a change here makes old and new records incomparable."""

_AGAIN = "the same command continues the run"
T = TypeVar("T")


def measure_on_servers(request: Request, servers: Servers, out: Path, asked: Asked | None = None) -> Run:
    """Measure what ``out`` does not hold yet of ``request`` on servers, then ask lm-eval's tasks; return the run.

    Raises:
        UsageError: the request or the servers cannot be right.
        MxqError: a server does not start, fails twice in one cell, or answers what cannot be.
        InterruptedRunError: Ctrl-C or SIGTERM.
    """
    plan, template = prepare(request, engine=VLLM, semantics=SEMANTICS)
    tasks = None
    if asked is not None:  # before hours of measuring what is refused after
        refuse_foreign(out)
        check_asked(asked, plan, servers, out)
        tasks = load_tasks(asked)
    fleet = Fleet(plan, servers)
    run_on_servers(plan, out, fleet, template, at_once=servers.at_once)
    if tasks is not None:
        ask_tasks(tasks, plan, fleet, out)
    return read_run(out)


def run_on_servers(plan: Plan, path: Path, fleet: Fleet, template: ChatTemplate, *, at_once: int = 1) -> None:
    """Measure every cell of ``plan`` that ``path`` does not hold yet; see :func:`measure_on_servers`."""
    refuse_foreign(path)
    around = {
        "versions": files.versions("torch", "transformers", "safetensors", "numpy", "aiohttp"),
        "hardware": files.hardware(),
        "engine": fleet.facts(),
    }
    with open_run(path, plan, around) as cells:
        everything = _Everything(plan, path, fleet, template, cells, at_once)
        stop = Stop()
        places = [_Place(everything, gpus, at_once, stop) for gpus in fleet.places]
        try:
            _side_by_side(places, stop)
        except KeyboardInterrupt:
            finished = sum(cell.finished for cell in cells.values())
            raise InterruptedRunError(
                f"interrupted; {finished} of {len(cells)} cells are recorded", "run the same command again to continue"
            ) from None


def order(arms: Sequence[Arm], repeat: int) -> list[Arm]:
    """Return arms as a repeat measures them: targets and their arms take turns in being first, after the plain one."""
    targets = list(dict.fromkeys(arm.target for arm in arms))
    found: list[Arm] = []
    for target in _rotated(targets, repeat):
        mine = [arm for arm in arms if arm.target == target]
        found += [arm for arm in mine if arm.method == "ar"]
        found += _rotated([arm for arm in mine if arm.method != "ar"], repeat)
    return found


class Stop:
    """Ends what other threads do: what they wait for is cancelled, and nothing new is begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[asyncio.Task[Any], asyncio.AbstractEventLoop] = {}
        self.now = False
        """What is under way is given up, too."""
        self.soon = False
        """What is under way is finished."""

    def set(self) -> None:
        """Give up everything."""
        with self._lock:
            self.now = self.soon = True
            for task, loop in self._running.items():
                loop.call_soon_threadsafe(task.cancel)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in this thread; raises CancelledError if everything is given up meanwhile."""

        async def watched() -> T:
            task = asyncio.current_task()
            assert task is not None
            with self._lock:
                self._running[task] = asyncio.get_running_loop()
                if self.now:
                    task.cancel()
            try:
                return await coroutine
            finally:
                with self._lock:
                    del self._running[task]

        return asyncio.run(watched())


class _Everything:
    """What all places share: the cells of the run, and which arms are waiting."""

    def __init__(
        self,
        plan: Plan,
        path: Path,
        fleet: Fleet,
        template: ChatTemplate,
        cells: dict[Place, OpenCell],
        at_once: int,
    ) -> None:
        self.plan, self.path, self.fleet, self.template, self.cells = plan, path, fleet, template, cells
        self.waiting = deque((r, arm) for r in range(plan.repeats) for arm in order(plan.arms, r) if self.work(arm, r))
        sizes = {workload.workload.name: len(workload.token_ids) for workload in plan.workloads}
        left = sum(sizes[cell.cell.workload] for cell in cells.values() if not cell.finished)
        arms = [arm for _, arm in self.waiting]
        starts = len(set(arms)) if at_once >= len(set(arms)) else len(arms)
        self.meter = Meter(left, starts, len(fleet.places))
        self.servers: set[tuple[tuple[str, ...], Arm]] = set()
        self._numbers = {place: number for number, place in enumerate(cells, start=1)}

    def work(self, arm: Arm, repeat: int) -> bool:
        """Whether there is something to measure, or to ask, in an arm."""
        mine = [cell for cell in self.cells.values() if (cell.cell.arm, cell.cell.repeat) == (arm, repeat)]
        return any(not cell.finished or self.parted(cell) for cell in mine)

    def parted(self, cell: OpenCell) -> OpenCell | None:
        """Return the plain cell to compare with, where both are finished and near ties are not known yet."""
        place = reference(self.plan, cell.cell)
        plain = None if place is None else self.cells[place]
        if plain is None or not (cell.finished and plain.finished) or cell.has_near_ties:
            return None
        return plain

    def title(self, cell: OpenCell) -> str:
        """Say which cell it is."""
        arm, workload, concurrency, repeat = cell.cell.place
        again = f", repeat {repeat + 1}" if self.plan.repeats > 1 else ""
        number = self._numbers[cell.cell.place]
        return f"cell {number}/{len(self.cells)}: {arm.label}, {workload}, {concurrency} in flight{again}"


class _Place:
    """Where servers run, one after the other; some may stay open."""

    def __init__(self, everything: _Everything, gpus: tuple[str, ...], at_once: int, stop: Stop) -> None:
        self._all, self._gpus, self._at_once, self._stop = everything, gpus, at_once, stop
        self._open: OrderedDict[Arm, tuple[Server, contextlib.ExitStack]] = OrderedDict()
        self._compiled = False

    def run(self) -> None:
        """Measure arms until none is waiting."""
        try:
            while not self._stop.soon:
                try:
                    repeat, arm = self._all.waiting.popleft()
                except IndexError:
                    return
                self._arm(arm, repeat)
        finally:
            for arm in list(self._open):
                self._close(arm)

    def _arm(self, arm: Arm, repeat: int) -> None:
        plan, cells = self._all.plan, self._all.cells
        for workload in plan.workloads:
            for concurrency in plan.concurrencies:
                cell = cells[arm, workload.workload.name, concurrency, repeat]
                if self._stop.soon:
                    return
                if not cell.finished:
                    self._cell(cell, workload)
                self._near_ties(cell, workload)

    def _cell(self, cell: OpenCell, workload: TokenizedWorkload) -> None:
        """Measure a cell, on a new server if the first one is lost."""
        lost: list[str] = []
        arm, title = cell.cell.arm, self._all.title(cell)
        while True:
            server = self._server(arm)
            done = 0

            def advance(amount: int) -> None:
                nonlocal done
                done += amount
                self._all.meter.advance(amount, title)

            try:
                measuring = measure_cell(
                    server.endpoint, self._all.plan, cell.cell, workload, self._all.template, advance
                )
                with self._all.meter.measuring():
                    records, facts = self._stop.run(measuring)
                break
            except ServerError as error:
                process = server.endpoint.process
                gone = process is not None and (error.lost or process.ended)
                self._all.meter.advance(-done, title)
                self._close(arm)
                if not gone or lost:
                    raise ServerError(
                        f"{title}: {error.message}" + (f" (and once before: {lost[0]})" if lost else ""),
                        error.hint or (f"start it again; then {_AGAIN}" if process is None and error.lost else _AGAIN),
                        lost=error.lost,
                    ) from None
                lost.append(error.message)
                note(f"{arm.label}: {error.message}; starting it again, once")
        beside = len(self._all.servers) - 1
        described = self._all.fleet.describe(arm, server, self._all.path, beside)
        cell.complete(records, facts | {"server": described, "lost": lost})

    def _near_ties(self, cell: OpenCell, workload: TokenizedWorkload) -> None:
        """Ask about differences from plain answers, of this cell or, if it is the plain one, of those that waited."""
        mine = cell.cell
        for other in self._all.cells.values():
            plain = self._all.parted(other) if other.cell.workload == mine.workload else None
            if plain is not None and (other is cell or plain is cell):
                self._ask(other, plain, workload, mine.arm)

    def _ask(self, cell: OpenCell, plain: OpenCell, workload: TokenizedWorkload, arm: Arm) -> None:
        told: dict[str, Any] = {
            "near_ties": None,
            "near_ties_against": {"arm": plain.cell.arm.label, "concurrency": plain.cell.concurrency},
        }
        found = list(differences(workload, cell.records(), plain.records(), self._all.template))
        server = self._server(arm) if found else None
        try:
            ties = self._stop.run(near_ties(server.endpoint, found)) if server else []
            told["near_ties"] = [asdict(tie) for tie in ties]
        except ServerError as error:
            if error.lost:
                note(f"{arm.label}: {error.message}; how near ties are is left for the next time")
                self._close(arm)
                return
            told["near_ties_missing"] = error.message
        cell.keep_near_ties(told | {"near_ties_asked": arm.label})

    def _server(self, arm: Arm) -> Server:
        """Return the arm's server, started if need be: at once with those of the next arms, if there is room for them.

        But the first one of all alone: what it compiles, others find compiled, where each would else compile it anew
        (14 servers of a small model on 16 processors took 350 s, and 40 s with that of an earlier start). One that is
        not needed yet and does not start is left for later, when it is tried again.
        """
        if arm in self._open:
            self._open.move_to_end(arm)
            return self._open[arm][0]
        while len(self._open) >= self._at_once:
            self._close(next(iter(self._open)))
        arms = [arm, *(self._next(arm, self._at_once - len(self._open) - 1) if self._compiled else ())]
        with ThreadPoolExecutor(len(arms)) as pool:
            starting = {one: pool.submit(self._started, one) for one in arms}
        for one in reversed(arms):
            if starting[one].exception() is None:
                self._open[one] = starting[one].result()
                self._all.servers.add((self._gpus, one))
        error = starting[arm].exception()
        if isinstance(error, ServerError):
            raise ServerError(f"{arm.label}: {error.message}", error.hint, lost=True) from None
        if error is not None:
            raise error
        self._compiled = True
        return self._open[arm][0]

    def _next(self, arm: Arm, room: int) -> list[Arm]:
        """Return arms that this place will measure and that have no server yet, as many as there is room for."""
        if len(self._all.fleet.places) > 1:  # another place may take them
            return []
        waiting = dict.fromkeys(one for _, one in self._all.waiting)
        return [one for one in waiting if one != arm and one not in self._open][:room]

    def _started(self, arm: Arm) -> tuple[Server, contextlib.ExitStack]:
        stack, begin = contextlib.ExitStack(), time.monotonic()
        where = f" on GPU {','.join(self._gpus)}" if self._gpus else ""
        if arm not in self._all.fleet.attached:
            note(f"starting a server for {arm.label}{where}")
        opening = self._all.fleet.open(arm, self._all.path, self._gpus, lambda: self._stop.now)
        with self._all.meter.starting():
            server = stack.enter_context(opening)
        if arm not in self._all.fleet.attached:
            note(f"{arm.label}{where} is ready after {time.monotonic() - begin:.0f} s")
        return server, stack

    def _close(self, arm: Arm) -> None:
        if arm in self._open:
            self._all.servers.discard((self._gpus, arm))
            self._open.pop(arm)[1].close()


def _side_by_side(places: Sequence[_Place], stop: Stop) -> None:
    """Run all places to their end; after a failure, others finish the cell that they are in."""
    with ThreadPoolExecutor(len(places)) as pool:
        running = [pool.submit(place.run) for place in places]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
            stop.soon = True
            for one in running:
                one.result()
        except BaseException as error:
            if not isinstance(error, MxqError):
                stop.set()
            raise


def _rotated(items: Sequence[T], by: int) -> list[T]:
    first = by % len(items) if items else 0
    return [*items[first:], *items[:first]]
