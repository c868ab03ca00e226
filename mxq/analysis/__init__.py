"""From recorded runs to what they say: numbers, checks between cells. Nothing is written and nothing is shown here."""

from mxq.analysis.summary import CellSummary, Summary, summarise

__all__ = ["CellSummary", "Summary", "summarise"]
