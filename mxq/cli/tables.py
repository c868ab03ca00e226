"""What the tables of several verbs have in common."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def table(*columns: str) -> "Table":
    """Return an empty table; columns whose title begins with ``>`` hold numbers, the others text that may be folded."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    empty = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        if column[0] == ">":
            empty.add_column(column[1:], justify="right", no_wrap=True)
        else:
            empty.add_column(column, overflow="fold")
    return empty


def show(full: "Table") -> None:
    """Print a table on stdout: folded to the width of a terminal; whole in a pipe or file, so that names are found.

    Numbers are never cut: a terminal that is too narrow for them wraps the lines.
    """
    from rich.console import Console
    from rich.measure import Measurement

    from mxq.report.whole import print_whole

    console = Console(markup=False)
    if console.is_terminal:
        print_whole(console, full)
        return
    needed = Measurement.get(console, console.options.update(max_width=1000), full).maximum
    Console(markup=False, width=max(console.width, needed)).print(full)


def numbers_hidden(name: str) -> str:
    """Return a tensor's name with ``*`` for its layer and expert numbers."""
    return _NUMBER.sub("*", name)
