"""All that a report says of a run, computed once for whatever it is written as."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mxq.analysis.comparison import DEFAULT_MARGINS, Comparison, compare
from mxq.analysis.intervals import Intervals, intervals
from mxq.analysis.published import Beside, beside
from mxq.analysis.summary import Summary, summarise
from mxq.analysis.sweep import Sweep, sweep
from mxq.errors import MxqError, UsageError
from mxq.evaluate import Run
from mxq.explain import Why, read_explanations, why
from mxq.quality import Quality, judge, read_qualities
from mxq.stats import Margins, Resampling


@dataclass(frozen=True)
class Analysed:
    """A run in numbers.

    ``comparison`` is of its MXFP4 arms with bf16's; without one ``refused`` says why. ``choices`` is None where there
    is nothing to choose from. ``why`` and ``quality`` have no parts where they were not measured.
    """

    run: Run
    summary: Summary
    intervals: Intervals
    comparison: Comparison | None
    refused: str | None
    choices: Sweep | None
    published: Beside
    why: Why
    quality: Quality
    resampling: Resampling


def analyse_all(runs: Sequence[Run], resampling: Resampling, margins: Margins = DEFAULT_MARGINS) -> list[Analysed]:
    """Analyse runs in order; a run of MXFP4 alone is compared with the one run of bf16 alone, if there is one.

    Raises what :func:`analyse` does.
    """
    alone = [run for run in runs if _targets(run) == {"bf16"}]
    base = alone[0] if len(alone) == 1 else None
    return [analyse(run, resampling, margins, base if _targets(run) == {"mxfp4"} else None) for run in runs]


def analyse(run: Run, resampling: Resampling, margins: Margins = DEFAULT_MARGINS, base: Run | None = None) -> Analysed:
    """Compute everything that a report says of a run; ``base`` is a run to compare with, by default itself.

    Raises MxqError where a run is damaged, or no prompt of it has been answered by all arms yet.
    """
    with as_written(run):
        comparison, refused = _compared(run, base, resampling, margins)
        try:
            choices = sweep(run, resampling)
        except UsageError:  # one arm of each target
            choices = None
        return Analysed(
            run=run,
            summary=summarise(run),
            intervals=intervals(run, resampling),
            comparison=comparison,
            refused=refused,
            choices=choices,
            published=beside(run, resampling),
            why=why(read_explanations(run.path, run.info["definition"]), resampling),
            quality=judge(read_qualities(run.path, run.info["definition"]), resampling),
            resampling=resampling,
        )


@contextlib.contextmanager
def as_written(run: Run) -> Iterator[None]:
    """Raise MxqError for what a run.json or a cell.json can hold only if mxq has not written it."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise MxqError(
            f"{run.path}: a run.json or cell.json is not as mxq wrote it ({error!r:.200})", "start a new run"
        ) from error


def _compared(
    run: Run, base: Run | None, resampling: Resampling, margins: Margins
) -> tuple[Comparison | None, str | None]:
    """Return the comparison, or why there is none."""
    targets = _targets(run)
    if base is None and len(targets) < 2:
        return None, f"Only {' and '.join(targets)} was measured: there is nothing to compare it with."
    try:
        return compare(base or run, run, margins=margins, resampling=resampling), None
    except UsageError as error:  # unlike arms are no reason to hide what each of them is
        return None, f"The arms cannot be compared. {error.message}: {error.hint}."


def _targets(run: Run) -> set[str]:
    return {cell.arm.target for cell in run.cells}
