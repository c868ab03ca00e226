"""What the tables of several verbs have in common."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def table(*columns: str) -> "Table":
    """Return an empty table; columns whose title begins with ``>`` hold numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    empty = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        empty.add_column(column.removeprefix(">"), justify="right" if column[0] == ">" else "left", no_wrap=True)
    return empty


def show(full: "Table") -> None:
    """Print a table on stdout at its whole width: names are there to be copied, so none is folded or cut."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(markup=False)
    needed = Measurement.get(console, console.options.update(max_width=1000), full).maximum
    Console(markup=False, width=max(console.width, needed)).print(full)


def numbers_hidden(name: str) -> str:
    """Return a tensor's name with ``*`` for its layer and expert numbers."""
    return _NUMBER.sub("*", name)
