"""What recorded cells hold for statistics: sums by conversation.

The same question asked again is no more evidence about other questions: conversations that say the same are one.
"""

from collections.abc import Iterable

from mxq.evaluate import RecordedCell
from mxq.evaluate.records import conversations
from mxq.stats import Counts, Timed, count, timed


def counts(cell: RecordedCell) -> Counts | None:
    """Return the verify passes of a speculative cell; None where a server gave sums over all requests only."""
    passes = [known for record in cell.records if (known := record.passes) is not None]
    if not passes or len(passes) < len(cell.records):
        return None
    return count(passes, names(cell), cell.arm.num_speculative_tokens)


def times(cells: Iterable[RecordedCell]) -> Timed:
    """Return tokens and seconds of the repeats of a cell with one request in flight."""
    cells = list(cells)
    records = [record for cell in cells for record in cell.records]
    return timed(
        [record.output_tokens for record in records],
        [record.duration_s for record in records],
        [name for cell in cells for name in names(cell)],
    )


def names(cell: RecordedCell) -> list[str]:
    """Return for each record the conversation that it is drawn with, by the prompt that it began with."""
    return [cell.twins.get(began, began) for began in conversations(cell.records)]
