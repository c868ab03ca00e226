"""A report as Markdown, to be pasted into an issue or a review: the verdict and the tables, without pictures."""

import re
from collections.abc import Iterator

from mxq.report.page.content import Cell, Grid, Page, Section

_SPECIAL = re.compile(r"([\\`*_\[\]|<>~$&])")
_FIRST = re.compile(r"^(?=[#+=-])|(?<=^\d)(?=[.)]\s)|(?<=^\d\d)(?=[.)]\s)")
"""Where a line would begin a heading, a rule or a list."""
_JOINER = "\u2060"
"""Between a sign and the name behind it, so that nobody is called and nothing is linked."""


def write_markdown(page: Page) -> str:
    """Return the report in GitHub's Markdown."""
    return "\n".join(_lines(page)).rstrip() + "\n"


def plain(text: str) -> str:
    """Return text that means nothing to Markdown: no markup, no HTML, no mention, no link, and one line."""
    text = " ".join(_SPECIAL.sub(r"\\\1", text).split())
    return re.sub(r"@(?=\w)|(?<=\w)://|(?<=www)\.", lambda found: _joined(found[0]), text)


def _paragraph(text: str) -> str:
    """Return it for the start of a line."""
    return _FIRST.sub(r"\\", plain(text))


def _joined(sign: str) -> str:
    return f"{sign}{_JOINER}" if sign == "@" else f"{_JOINER}{sign}"


def _lines(page: Page) -> Iterator[str]:
    yield from (f"# {plain(page.title)}", "")
    for note in page.notes:
        yield from (_paragraph(note), "")
    for part in page.parts:
        yield from (f"## {plain(part.title)}", "", _paragraph(part.subtitle), "")
        yield from (f"**{plain(part.verdict.word)}.** {plain(part.verdict.text)}", "")
        for section in part.sections:
            yield from _section(section)
    yield _paragraph(page.made_by)


def _section(section: Section) -> Iterator[str]:
    grids = (*section.grids, *section.after)
    if not (grids or section.text or section.warnings):
        return  # pictures alone
    yield from (f"### {plain(section.title)}", "")
    for warning in section.warnings:
        yield from (f"> **Warning:** {plain(warning)}", "")
    for paragraph in section.text:
        yield from (_paragraph(paragraph), "")
    for grid in grids:
        if grid.folded:
            yield from (
                f"<details><summary>{_escaped(grid.caption)}</summary>",
                "",
                *_table(grid),
                "",
                "</details>",
                "",
            )
        else:
            yield from (f"{_paragraph(grid.caption)}:", "", *_table(grid), "")
    for paragraph in section.closing:
        yield from (_paragraph(paragraph), "")


def _table(grid: Grid) -> Iterator[str]:
    yield _row([plain(name) for name in grid.columns])
    side = " --- " if grid.wide else " ---: "
    yield f"| --- |{'|'.join([side] * (len(grid.columns) - 1))}|"
    for row in grid.rows:
        yield _row([_entry(cell) for cell in row])


def _entry(cell: Cell) -> str:
    text = "<br>".join(plain(line) for line in cell.text.splitlines())
    text = f"**{text}**" if cell.tone and text else text
    return f"{text} ({plain(cell.below)})" if cell.below else text


def _row(entries: list[str]) -> str:
    return f"| {' | '.join(entries)} |"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", f"@{_JOINER}")
