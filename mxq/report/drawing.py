"""Drawing pictures with matplotlib (``pip install mxq[plot]``): whole for notebooks, panel by panel for pages.

A page lays panels out itself, and colours them for a light or a dark ground: in the SVG of a panel every colour is a
variable of the page's style sheet, and every text is text.
"""

import contextlib
import io
import math
import re
import warnings
from collections.abc import Iterator
from html import escape
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from mxq.errors import MxqError
from mxq.report.pictures import Panel, Picture, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Targets have blue and vermilion of Okabe and Ito's palette: told apart by everyone, also in grey. Routes have others.
COLOURS = {
    "bf16": "#0072B2",
    "mxfp4": "#D55E00",
    "features": "#8F4E8B",
    "logits": "#00795C",
    "guide": "#666666",
}
_INK = "#222222"
_GRID = "#DDDDDD"
VARIABLES = {colour.lower(): name for name, colour in (*COLOURS.items(), ("ink", _INK), ("grid", _GRID))}
"""The variable of a page's style sheet that takes a colour's place."""

WIDTH, HEIGHT = 320, 216
"""Of a panel, in pixels at which a phone shows it; letters are as many pixels high as points."""
_LETTERS = 12
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 24, 40
_BAR = 17
"""Height of a bar."""
_UNUSED = re.compile(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>|<!--.*?-->", re.DOTALL)
_ID = re.compile(r' id="([^"]*)"')
_USE = re.compile(r'(?<=href="#)([^"]+)(?=")|(?<=url\(#)([^)]+)(?=\))')
_COLOUR = re.compile(r'#[0-9a-f]{6}(?=[;"])')
_FONT = re.compile(r' font-family: [^;"]*;| transform="rotate\(-0 [^"]*"')


def figure(picture: Picture) -> "Figure":
    """Return all panels in one figure with one legend.

    Raises MxqError without matplotlib, ValueError for a picture without panels.
    """
    with _ready():
        from matplotlib.figure import Figure

        if not picture.panels:
            raise ValueError(f"{picture.key} has nothing to draw")
        columns = min(3, len(picture.panels))
        rows = math.ceil(len(picture.panels) / columns)
        drawn = Figure(figsize=(1.0 + 2.9 * columns, 0.9 + 2.3 * rows), dpi=110, layout="constrained")
        grid = drawn.subplots(rows, columns, sharey=True, squeeze=False)
        for panel, axes in zip_longest(picture.panels, grid.flat):
            if panel is None:
                axes.set_axis_off()
                continue
            axes.set_title(panel.title, fontsize=10, parse_math=False)
            paint(axes, picture, panel)
        drawn.supxlabel(picture.y_label if picture.categories else picture.x_label, fontsize=10)
        drawn.supylabel(picture.x_label if picture.categories else picture.y_label, fontsize=10)
        handles = {
            label: handle
            for axes in drawn.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        drawn.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=5, frameon=False, fontsize=9)
        return drawn


def svg(picture: Picture, panel: Panel, name: str) -> str:
    """Return a panel as an element to put into a page, with its text alternative and without its title.

    ``name`` is part of all ids, so that those of several panels in one page differ. The same panel gives the same
    characters. Raises MxqError without matplotlib.
    """
    with _ready():
        import matplotlib
        from matplotlib.figure import Figure

        matplotlib.rcdefaults()  # whatever the user prefers for other figures
        matplotlib.rcParams.update(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": "mxq",
                "text.parse_math": False,
                "font.size": _LETTERS,
                **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), _INK),
                **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), COLOURS["guide"]),
            }
        )
        left, top, height = _LEFT, _TOP, HEIGHT
        if picture.categories:
            left, top = 14 + round(0.6 * _LETTERS * max(map(len, picture.categories))), 6
            height = top + _BOTTOM + (_BAR * max(1, len(panel.series)) + 6) * len(picture.categories)
        drawn = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)  # a point is a pixel
        room = (left / WIDTH, _BOTTOM / height, 1 - (left + _RIGHT) / WIDTH, 1 - (top + _BOTTOM) / height)
        axes = drawn.add_axes(room)
        paint(axes, picture, panel)
        drawn.patch.set_visible(False)
        axes.patch.set_visible(False)
        axes.set_xlabel(picture.y_label if picture.categories else picture.x_label)
        if not picture.categories:
            drawn.text(2 / WIDTH, 1 - 4 / height, picture.y_label, va="top")
        written = io.StringIO()
        drawn.savefig(written, format="svg", metadata={"Date": None})
    title = escape(f"{picture.title}: {panel.title}")
    return _inlined(written.getvalue(), name, title, escape(picture.described(panel)))


def paint(axes: "Axes", picture: Picture, panel: Panel) -> None:
    """Draw a panel into ``axes``, without its title and the axes' names."""
    from matplotlib.ticker import MaxNLocator

    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if picture.categories:
        _paint_bars(axes, picture, panel)
        return
    for value in picture.references:
        axes.axhline(value, color=COLOURS["guide"], linewidth=0.9, linestyle=":")
    for one in panel.series:
        _paint_line(axes, one)
    if picture.doubling:
        axes.set_xscale("log", base=2)
    if picture.ticks:
        axes.set_xticks(picture.ticks, [picture.x_text(x) for x in picture.ticks])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, min_n_ticks=3))
    axes.minorticks_off()
    axes.set_ylim(picture.y_range)
    axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=3))


def _paint_line(axes: "Axes", one: Series) -> None:
    x, y = [point.x for point in one.points], [point.y for point in one.points]
    colour = COLOURS[one.colour]
    style: dict[str, Any] = {
        "color": colour,
        "linestyle": one.line or "none",
        "marker": one.marker or None,
        "markersize": 4,
        "linewidth": 0.8 if one.colour == "guide" else 1.2,
        "label": one.name,
    }
    if all(point.lower is None for point in one.points):
        axes.plot(x, y, **style)
        return
    if one.band:
        lower, upper = zip(*(point.ends for point in one.points), strict=True)
        axes.fill_between(x, lower, upper, color=colour, alpha=0.2, linewidth=0)
        axes.plot(x, y, **style)
    else:
        axes.errorbar(x, y, yerr=_whiskers(one), capsize=2, elinewidth=0.9, **style)


def _paint_bars(axes: "Axes", picture: Picture, panel: Panel) -> None:
    """Draw series side by side in every category, the first category on top."""
    from matplotlib.ticker import MaxNLocator

    thick = 0.8 / max(1, len(panel.series))
    for number, one in enumerate(panel.series):
        at = [point.x + (number - (len(panel.series) - 1) / 2) * thick for point in one.points]
        axes.barh(
            at,
            [point.y for point in one.points],
            height=thick * 0.88,
            color=COLOURS[one.colour],
            label=one.name,
            xerr=None if all(point.lower is None for point in one.points) else _whiskers(one),
            error_kw={"ecolor": _INK, "color": _INK, "elinewidth": 1, "capsize": 2},
        )
    for value in picture.references:
        axes.axvline(value, color=COLOURS["guide"], linewidth=0.9, linestyle=":")
    axes.set_yticks(range(len(picture.categories)), picture.categories)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(picture.categories) - 0.5, -0.5)
    axes.set_xlim(picture.y_range)
    axes.xaxis.set_major_locator(MaxNLocator(5, min_n_ticks=3))
    axes.grid(visible=False, axis="y")


def _whiskers(one: Series) -> list[list[float]]:
    """Return how far intervals reach down and up from their values; nan where there is none."""
    ends = [(math.nan, math.nan) if point.lower is None else point.ends for point in one.points]
    down = [point.y - low for point, (low, _) in zip(one.points, ends, strict=True)]
    return [down, [high - point.y for point, (_, high) in zip(one.points, ends, strict=True)]]


@contextlib.contextmanager
def _ready() -> Iterator[None]:
    """Have matplotlib with settings that nobody else sees, and silent about letters that its font lacks."""
    try:
        import matplotlib
    except ImportError:
        raise MxqError("matplotlib is not installed, and pictures need it", "pip install 'mxq[report]'") from None
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        yield


def _inlined(written: str, name: str, title: str, described: str) -> str:
    """Return an SVG file as an element of a page: ids of its own, colours by variables, letters by the page."""
    body = _UNUSED.sub("", written[written.index("<svg") :]).replace("xlink:href", "href")
    used = {found for pair in _USE.findall(body) for found in pair if found}
    body = _ID.sub(lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", body)
    body = _USE.sub(lambda found: f"{name}-{found[1] or found[2]}", body)
    body = _COLOUR.sub(lambda found: f"var(--{VARIABLES[found[0]]})" if found[0] in VARIABLES else found[0], body)
    body = re.sub(r"\s*\n\s*", " ", _FONT.sub("", body))
    view = re.search(r'viewBox="[^"]*"', body)
    assert view is not None
    head = (
        f'<svg {view[0]} role="img" aria-labelledby="{name}-title {name}-text">'
        f'<title id="{name}-title">{title}</title><desc id="{name}-text">{described}</desc>'
    )
    return head + body[body.index(">") + 1 :].strip()
