"""Figures of a run for notebooks. They need matplotlib (``pip install mxq[plot]``), imported to draw the first."""

from typing import TYPE_CHECKING

from mxq.analysis.intervals import intervals
from mxq.analysis.summary import Summary
from mxq.errors import UsageError
from mxq.report import gallery
from mxq.report.drawing import COLOURS, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "acceptance_vs_k", "speed_vs_concurrency", "survival"]


def acceptance_vs_k(summary: Summary) -> "Figure":
    """Draw pooled acceptance length against the budget K, methods by line and targets by colour, with intervals."""
    _need_speculation(summary)
    return figure(gallery.acceptance_vs_k(summary, intervals(summary.run)))


def survival(summary: Summary, configuration: str | None = None) -> "Figure":
    """Draw the share of verify passes that accepted at least i drafts, bf16 against MXFP4, with bands.

    ``configuration`` is one of ``summary.configurations``; by default the last, which has the largest budget of DFlash
    if the run has DFlash.
    """
    _need_speculation(summary)
    chosen = configuration or summary.configurations[-1]
    if chosen not in summary.configurations:
        raise UsageError(f"the run has no {chosen}", f"it has {', '.join(summary.configurations)}")
    return figure(gallery.survival(summary, chosen, intervals(summary.run)))


def speed_vs_concurrency(summary: Summary, *, relative: bool = False) -> "Figure":
    """Draw output tokens per second against requests in flight, with the range over repeats.

    ``relative``: draw the speedup over plain decoding of the same target instead. What must not be shown as the speed
    of MXFP4 is not drawn.
    """
    picture = gallery.speed_vs_concurrency(summary, relative=relative)
    if not picture.panels:
        raise UsageError("the run has no speed that can be shown", "see the notes of its tables")
    return figure(picture)


def _need_speculation(summary: Summary) -> None:
    if not summary.configurations:
        raise UsageError("the run has no speculative arm, so there is nothing to draw", "run it with --spec dflash")
