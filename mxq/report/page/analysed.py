"""All that a report says of a run, computed once for whatever it is written as."""

from dataclasses import dataclass

from mxq.analysis.comparison import Comparison, compare
from mxq.analysis.intervals import Intervals, intervals
from mxq.analysis.published import Beside, beside
from mxq.analysis.summary import Summary, summarise
from mxq.analysis.sweep import Sweep, sweep
from mxq.errors import UsageError
from mxq.evaluate import Run
from mxq.explain import Why, read_explanations, why
from mxq.stats import Resampling


@dataclass(frozen=True)
class Analysed:
    """A run in numbers.

    ``comparison`` is of its MXFP4 with its bf16 arms; without one ``refused`` says why. ``choices`` is None where there
    is nothing to choose from. ``why`` has no parts where the run was not explained.
    """

    run: Run
    summary: Summary
    intervals: Intervals
    comparison: Comparison | None
    refused: str | None
    choices: Sweep | None
    published: Beside
    why: Why
    resampling: Resampling


def analyse(run: Run, resampling: Resampling) -> Analysed:
    """Compute everything that a report says of a run.

    Raises MxqError where the run is damaged, or no prompt of it has been answered by all arms yet.
    """
    summary = summarise(run)
    comparison, refused = _compared(run, summary, resampling)
    try:
        choices = sweep(run, resampling)
    except UsageError:  # one arm of each target
        choices = None
    return Analysed(
        run=run,
        summary=summary,
        intervals=intervals(run, resampling),
        comparison=comparison,
        refused=refused,
        choices=choices,
        published=beside(run, resampling),
        why=why(read_explanations(run.path, run.info["definition"]), resampling),
        resampling=resampling,
    )


def _compared(run: Run, summary: Summary, resampling: Resampling) -> tuple[Comparison | None, str | None]:
    """Return the comparison, or why there is none."""
    if len(summary.targets) < 2:
        return None, f"Only {summary.targets[0]} was measured: there is nothing to compare it with."
    try:
        return compare(run, resampling=resampling), None
    except UsageError as error:  # unlike arms are no reason to hide what each of them is
        return None, f"The arms cannot be compared. {error.message}: {error.hint}."
