"""All that a report says of a run, computed once for whatever it is written as."""

from dataclasses import dataclass

from mxq.analysis.comparison import Comparison, compare
from mxq.analysis.intervals import Intervals, intervals
from mxq.analysis.summary import Summary, summarise
from mxq.errors import UsageError
from mxq.evaluate import Run
from mxq.stats import Resampling


@dataclass(frozen=True)
class Analysed:
    """A run in numbers. ``comparison`` is of its MXFP4 with its bf16 arms; without one ``refused`` says why."""

    run: Run
    summary: Summary
    intervals: Intervals
    comparison: Comparison | None
    refused: str | None


def analyse(run: Run, resampling: Resampling) -> Analysed:
    """Compute everything that a report says of a run.

    Raises MxqError where the run is damaged, or no prompt of it has been answered by all arms yet.
    """
    summary, known = summarise(run), intervals(run, resampling)
    if len(summary.targets) < 2:
        why = f"Only {summary.targets[0]} was measured: there is nothing to compare it with."
        return Analysed(run, summary, known, None, why)
    try:
        return Analysed(run, summary, known, compare(run, resampling=resampling), None)
    except UsageError as error:  # unlike arms are no reason to hide what each of them is
        return Analysed(run, summary, known, None, f"The arms cannot be compared. {error.message}: {error.hint}.")
