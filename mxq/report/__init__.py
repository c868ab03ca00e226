"""What a run says, for people: numbers, terminal tables, figures."""

from mxq.report.summary import CellSummary, Summary, summarise

__all__ = ["CellSummary", "Summary", "summarise"]
