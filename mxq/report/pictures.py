"""What a picture shows, before it is drawn: drawing, legend, text alternative and table of numbers are made of it.

A picture is a row of small panels, one per workload or so, all on one scale. Colour means the target, line
and marker mean method and budget.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Colour = Literal["bf16", "mxfp4", "features", "logits", "guide"]
"""Of a target, of a route by which a target acts, or of what is there to compare with."""


@dataclass(frozen=True)
class Point:
    """A value ``y`` at ``x``, and its interval where there is one; in units of the picture's axes.

    ``name``: what was the same for the points of all series, where that is not ``x``.
    """

    x: float
    y: float
    lower: float | None = None
    upper: float | None = None
    name: str = ""

    @property
    def ends(self) -> tuple[float, float]:
        """Return the interval; value and value where there is none."""
        return (self.y if self.lower is None else self.lower), (self.y if self.upper is None else self.upper)


@dataclass(frozen=True)
class Series:
    """Points that belong together, in order of x. ``line`` and ``marker`` are matplotlib's ("" is none).

    Intervals are drawn as whiskers, or, if ``band``, as an area: what is a band over all points at once.
    """

    name: str
    colour: Colour
    points: tuple[Point, ...]
    line: str = "-"
    marker: str = "o"
    band: bool = False


@dataclass(frozen=True)
class Panel:
    """One small plot; ``title`` is mostly a workload."""

    title: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Picture:
    """Panels with common axes.

    Args:
        key: names it in links and ids.
        title: what it shows.
        x_label, y_label: quantities with their units.
        panels: may be empty: then there is nothing to draw.
        form: format of a value, in text and tables.
        categories: names of x = 0, 1, ...; then series are drawn as horizontal bars.
        x_ticks: where x has ticks; all values of x if empty.
        doubling: x is drawn on a scale of powers of two.
        top: upper end of y; what the values need if None.
        bottom: lower end of y; None for what the values need.
        references: values of y to draw lines at, such as a speedup of 1 or the ends of a margin.
        intervals: what the intervals are, in words; "" where there are none.
    """

    key: str
    title: str
    x_label: str
    y_label: str
    panels: tuple[Panel, ...]
    form: str = "{:.3f}"
    categories: tuple[str, ...] = ()
    x_ticks: tuple[float, ...] = ()
    doubling: bool = False
    top: float | None = None
    bottom: float | None = 0.0
    references: tuple[float, ...] = ()
    intervals: str = ""

    @property
    def legend(self) -> list[Series]:
        """Return one series of every name, in order."""
        return list({one.name: one for panel in self.panels for one in panel.series}.values())

    @property
    def ticks(self) -> list[float]:
        """Return where x has ticks; nothing where points have names instead."""
        return sorted(self.x_ticks or {point.x for point in _points(self.panels) if not point.name})

    @property
    def y_range(self) -> tuple[float, float]:
        """Return the ends of y, the same in all panels; a little more than what is drawn where it is not fixed."""
        ends = [end for point in _points(self.panels) for end in point.ends]
        ends += self.references
        lowest, highest = min(ends, default=0.0), max(ends, default=1.0)
        margin = 0.06 * ((highest - (lowest if self.bottom is None else self.bottom)) or 1.0)
        bottom = lowest - margin if self.bottom is None else self.bottom
        return bottom, highest + margin if self.top is None else self.top

    def x_text(self, x: float) -> str:
        """Return what a value of x is called."""
        return self.categories[int(x)] if self.categories else f"{x:g}"

    def y_text(self, point: Point) -> tuple[str, str]:
        """Return a value and its interval ("" without one) in words."""
        if point.lower is None or point.upper is None:
            return self.form.format(point.y), ""
        return self.form.format(point.y), f"{self.form.format(point.lower)} to {self.form.format(point.upper)}"

    def described(self, panel: Panel) -> str:
        """Return the text alternative of a panel: where every series begins and ends, or all bars."""
        said = [f"{self.y_label} by {self.x_label}."]
        for one in panel.series:
            ends = one.points if self.categories else tuple(dict.fromkeys((one.points[0], one.points[-1])))
            values = []
            for point in ends:
                value, interval = self.y_text(point)
                values.append(f"{value}{f' ({interval})' if interval else ''} at {self.x_text(point.x)}")
            said.append(f"{one.name}: {', '.join(values)}.")
        return " ".join(said)


def _points(panels: Sequence[Panel]) -> Iterator[Point]:
    return itertools.chain.from_iterable(one.points for panel in panels for one in panel.series)
