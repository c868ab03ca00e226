"""Tables on terminals that are narrower than their numbers: the terminal wraps lines then, and no digit is left out."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_TEXT = 8


def print_whole(console: Console, table: Table) -> None:
    """Print a table; as wide as its numbers and names need, should the console be narrower.

    rich cuts what does not fit, and a number without its last digits is another number. Text is folded.
    """
    wide = console.options.update(max_width=1 << 16)
    if Measurement.get(console, wide, table).maximum <= console.width:
        console.print(table)
        return
    width, (_, right, _, left) = console.width, table.padding
    needed, kept = 0, []
    for column in table.columns:
        header, *cells = (Measurement.get(console, wide, cell) for cell in (column.header, *column.cells))
        least = max([header.minimum, *(cell.minimum for cell in cells)])
        if column.no_wrap:
            least = max([header.maximum, *(cell.maximum for cell in cells)])
        if column.justify == "right" or column.no_wrap:
            kept.append((column, least, max([least, *(cell.maximum for cell in cells)])))
        else:
            column.overflow = "fold"
        needed += left + right + (least if column.justify == "right" or column.no_wrap else min(least, _TEXT))
    spare = max(width - needed, 0)
    for column, least, most in kept:  # between its words a cell may end a line, where there is no room for all of them
        column.width = most if most - least <= spare else least
        spare -= column.width - least
    try:
        console.width = max(width, needed)
        console.print(table)
    finally:
        console.width = width
