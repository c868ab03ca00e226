"""What recorded cells hold for statistics: sums by conversation."""

from collections.abc import Iterable

from mxq.evaluate import RecordedCell
from mxq.evaluate.records import conversations
from mxq.stats import Counts, Timed, count, timed


def counts(cell: RecordedCell) -> Counts | None:
    """Return the verify passes of a speculative cell; None where a server gave sums over all requests only."""
    passes = [known for record in cell.records if (known := record.passes) is not None]
    if not passes or len(passes) < len(cell.records):
        return None
    return count(passes, conversations(cell.records), cell.arm.num_speculative_tokens)


def times(cells: Iterable[RecordedCell]) -> Timed:
    """Return tokens and seconds of the repeats of a cell with one request in flight."""
    records = [record for cell in cells for record in cell.records]
    return timed(
        [record.output_tokens for record in records],
        [record.duration_s for record in records],
        conversations(records),
    )
