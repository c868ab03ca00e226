"""What a report says, whatever it is written as: parts, sections, tables, pictures. All text is plain.

Names of workloads and models, warnings and logs come from a run directory, which anybody may have made. They stay text
in every form: whoever writes one escapes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from mxq.report.pictures import Picture

Tone = Literal["", "preserved", "degraded", "improved", "undecided", "withheld", "failed"]


@dataclass(frozen=True)
class Cell:
    """One entry of a table; ``below`` is its interval, or what else belongs in a second line."""

    text: str
    below: str = ""
    tone: Tone = ""


NONE = Cell("–")
"""There is no such number."""


@dataclass(frozen=True)
class Grid:
    """A table: its first column names the rows. ``folded``: shown when asked for."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    folded: bool = False
    wide: bool = False
    """Whether its cells hold sentences and not numbers."""


@dataclass(frozen=True)
class Section:
    """One heading with what stands below it, in this order."""

    key: str
    title: str
    text: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    grids: tuple[Grid, ...] = ()
    pictures: tuple[Picture, ...] = ()
    after: tuple[Grid, ...] = ()
    """Tables below the pictures."""
    closing: tuple[str, ...] = ()
    """What is said at the end."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.text or self.warnings or self.grids or self.pictures or self.after)


@dataclass(frozen=True)
class Verdict:
    """What a part comes down to: a word, its tone, and a sentence or two."""

    word: str
    tone: Tone
    text: str


@dataclass(frozen=True)
class Part:
    """All of one comparison: mostly one run."""

    key: str
    title: str
    subtitle: str
    verdict: Verdict
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class Page:
    """The whole report."""

    title: str
    parts: tuple[Part, ...]
    made_by: str
    notes: tuple[str, ...] = field(default=())


def cells(texts: Sequence[str | Cell]) -> tuple[Cell, ...]:
    """Return a row of a table."""
    return tuple(one if isinstance(one, Cell) else Cell(one) for one in texts)


def numbers(picture: Picture) -> Grid:
    """Return the table of what a picture shows: a row for every curve, a column for every value of x."""
    points = [point for panel in picture.panels for one in panel.series for point in one.points]
    named = any(point.name for point in points)
    columns = list(dict.fromkeys(point.name for point in points)) if named else sorted({point.x for point in points})
    rows = []
    for panel in picture.panels:
        for one in panel.series:
            if one.colour == "guide":
                continue
            row: list[str | Cell] = [f"{panel.title} · {one.name}"]
            at = {point.name if named else point.x: point for point in one.points}
            for column in columns:
                if (point := at.get(column)) is None:
                    row.append(NONE)
                    continue
                value, interval = picture.y_text(point)
                row.append(Cell(value, f"at {point.x:.2f}" if named else interval))
            rows.append(cells(row))
    heads = [name if isinstance(name, str) else picture.x_text(name) for name in columns]
    caption = f"{picture.y_label} by {picture.x_label}"
    return Grid(caption, ("", *heads), tuple(rows), folded=True)
