"""A report as one file of HTML: no script, nothing fetched, read offline, on a phone or on paper.

Whatever a run directory says is escaped by the template; the file also forbids scripts and requests by its own policy.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mxq.errors import MxqError
from mxq.report.drawing import svg
from mxq.report.page.content import Grid, Page, numbers
from mxq.report.pictures import Picture, Series

if TYPE_CHECKING:
    from markupsafe import Markup

_HERE = Path(__file__).parent
_DASHES = {"-": "", "--": ' stroke-dasharray="5 2.5"', ":": ' stroke-dasharray="1.5 2.5"'}
_MARKS = {
    "o": '<circle cx="15" cy="6" r="3"/>',
    ".": '<circle cx="15" cy="6" r="1.6"/>',
    "s": '<rect x="12" y="3" width="6" height="6"/>',
    "^": '<path d="M15 2.5L18.5 9H11.5Z"/>',
    "v": '<path d="M15 9.5L18.5 3H11.5Z"/>',
    "D": '<path d="M15 2L19 6L15 10L11 6Z"/>',
    "": "",
}


@dataclass(frozen=True)
class _Drawn:
    """A picture with its panels, what its curves are called, and its numbers."""

    id: str
    picture: Picture
    legend: "list[tuple[Markup, str]]"
    panels: "list[tuple[str, Markup]]"
    numbers: Grid


def write_html(page: Page) -> str:
    """Return the report; the same page gives the same characters. Raises MxqError without jinja2 or matplotlib."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError:
        raise MxqError("jinja2 is not installed, and a page needs it", "pip install 'mxq[report]'") from None
    drawn = {
        (part.key, section.key): [
            _Drawn(
                id=(name := f"{part.key}-picture-{picture.key}"),
                picture=picture,
                legend=[(Markup(_swatch(one, bars=bool(picture.categories))), one.name) for one in picture.legend],
                panels=[
                    (panel.title, Markup(svg(picture, panel, f"{name}-{number}")))
                    for number, panel in enumerate(picture.panels)
                ],
                numbers=numbers(picture),
            )
            for picture in section.pictures
        ]
        for part in page.parts
        for section in part.sections
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_unbroken,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = Markup((_HERE / "page.css").read_text(encoding="utf-8"))
    return environment.get_template("page.html.jinja").render(page=page, drawn=drawn, style=style).strip() + "\n"


def _unbroken(value: object) -> object:
    """Return text in which no line ends between a number and its percent sign."""
    return re.sub(r"(?<=\d) %", "\u00a0%", value) if type(value) is str else value


def _swatch(one: Series, *, bars: bool) -> str:
    """Return a piece of a curve for the legend."""
    colour = f"var(--{one.colour})"
    area = f'<rect width="30" height="12" fill="{colour}" fill-opacity="{1 if bars else 0.2}"/>'
    line = f'<path d="M0 6H30" stroke="{colour}" stroke-width="1.5" fill="none"{_DASHES.get(one.line, "")}/>'
    mark = f'<g fill="{colour}">{_MARKS[one.marker]}</g>'
    inside = area if bars else (area * one.band + line * bool(one.line) + mark)
    return f'<svg viewBox="0 0 30 12" aria-hidden="true">{inside}</svg>'
