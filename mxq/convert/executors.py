"""Who makes the files of a conversion: this process, or the nodes of a Ray cluster (:mod:`mxq.convert.ray_cluster`)."""

from collections.abc import Callable, Generator, Sequence
from typing import Any

from mxq.convert.partial import Partial
from mxq.convert.work import Work
from mxq.progress import Advance

Done = tuple[Work, dict[str, Any], list[dict[str, Any]]]
"""A work whose file is in the directory of complete files, and what :meth:`mxq.convert.work.Work.make` returned."""

Executor = Callable[[Sequence[Work], Partial, Advance], Generator[Done, None, None]]
"""Makes files and yields each as it is there, in any order; nobody but its caller writes the journal."""


def local(jobs: int) -> Executor:
    """Return what makes one file after the other, with ``jobs`` threads."""

    def execute(works: Sequence[Work], partial: Partial, advance: Advance) -> Generator[Done, None, None]:
        for work in works:
            yield work, *work.make(partial.directory, jobs, advance)

    return execute
