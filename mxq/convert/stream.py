"""A source of which only the files that are needed next are on the disk.

Output files are made one after the other. What an output file takes from one source file is done together, in a stage:
the source file is fetched before it, and removed after the last stage that reads it. So one is there at a time, but
where a tensor needs two, or a later output file needs one that is there while the next is fetched.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from mxq.checkpoint import Checkpoint
from mxq.convert.plan import Group, Plan
from mxq.progress import Advance

Files = tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """A part of the work for an output file.

    Attributes:
        files: the source files that are read in it, of those that are not here for good.
        fetch: those of them to be fetched before it.
        drop: those on the disk that nothing needs after it.
    """

    files: Files
    fetch: Files
    drop: Files


def schedule(needs: Sequence[Iterable[Files]]) -> list[list[Stage]]:
    """Order the stages of every output file so that few source files are there at once, and none is fetched twice.

    Args:
        needs: for every output file, in order, which source files are read together, in the order of the source.
    """
    wanted = [list(dict.fromkeys(work)) for work in needs]
    last = {name: i for i, work in enumerate(wanted) for files in work for name in files}
    here: set[str] = set()
    planned = []
    for i, left in enumerate(wanted):
        stages = []
        while left:
            # First what is here, last what stays here for a later output file.
            files = min(left, key=lambda files: (len({*files} - here), sum(last[name] > i for name in files)))
            left.remove(files)
            fetch = tuple(name for name in files if name not in here)
            here.update(fetch)
            needed = {name for files in left for name in files}
            drop = tuple(sorted(name for name in here - needed if last[name] == i))
            here.difference_update(drop)
            stages.append(Stage(files, fetch, drop))
        planned.append(stages)
    return planned


def most_at_once(plan: Plan, names: Collection[str]) -> tuple[int, int]:
    """Return how many source files, and how many bytes, are on the disk at once if the files ``names`` are fetched."""
    works = ([plan.groups[outputs[0].name] for outputs in shard.groups] for shard in plan.shards)
    here: set[str] = set()
    count = size = 0
    for stages in schedule([_needs(plan.source, groups, names) for groups in works]):
        for stage in stages:
            here.update(stage.fetch)
            count, size = max(count, len(here)), max(size, sum(plan.source.sizes[name] for name in here))
            here.difference_update(stage.drop)
    return count, size


def _needs(source: Checkpoint, groups: Iterable[Group], names: Collection[str]) -> list[Files]:
    return [_files(source, tensor, names) for group in groups for tensor in group.reads()]


def _files(source: Checkpoint, tensor: str, names: Collection[str]) -> Files:
    return tuple(name for name in source.files_of(tensor) if name in names)


class _Reading(Protocol):
    @property
    def reads(self) -> str: ...


T = TypeVar("T", bound=_Reading)


class Feed:
    """Has files of a source in a directory while they are read.

    Attributes:
        source: the checkpoint to read.
        nbytes: how much there is to fetch.
    """

    def __init__(
        self,
        source: Checkpoint,
        works: Sequence[Iterable[Group]],
        directory: Path,
        fetch: Callable[[str, int, Advance], None],
    ) -> None:
        """Prepare for the making of output files, and remove what of ``source`` is in the way.

        Args:
            source: what is read; its files that are elsewhere are those to be fetched.
            works: what every output file is made of, in order.
            directory: where files are put.
            fetch: makes sure that a file is there, given its name, its size and what to tell of its bytes.
        """
        self.source = source.with_files_in(directory)
        self._names, self._sizes = frozenset(source.elsewhere), source.sizes
        self._directory, self._fetch = directory, fetch
        stages = schedule([_needs(source, groups, self._names) for groups in works])
        first = next((stage.fetch for work in stages for stage in work if stage.fetch), ())
        for name in self._names.difference(first):  # what is needed later would be one more than was planned
            self._remove(name)
        self.nbytes = sum(self._sizes[name] for work in stages for stage in work for name in stage.fetch)
        self._stages = iter(stages)

    def batches(self, tasks: Sequence[T], advance: Advance) -> Iterator[list[T]]:
        """Yield the tasks of the next output file, together those that read the same files, which are there then.

        ``advance`` is told the bytes that are fetched, and what goes on.
        """
        together: dict[Files, list[T]] = defaultdict(list)
        for task in tasks:
            together[_files(self.source, task.reads, self._names)].append(task)
        for stage in next(self._stages):
            for name in stage.fetch:
                advance(0, f"downloading {name}")
                self._fetch(name, self._sizes[name], advance)
            advance(0, "converting")
            yield together[stage.files]
            for name in stage.drop:
                self._remove(name)

    def _remove(self, name: str) -> None:
        (self._directory / name).unlink(missing_ok=True)
