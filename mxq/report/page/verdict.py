"""What a report begins with: the verdict of a comparison, and the changes with the intervals that it rests on."""

from collections.abc import Iterator

from mxq.analysis.changes import ACCEPTANCE, SPEED, SURVIVAL, Quantity
from mxq.analysis.comparison import Comparison
from mxq.analysis.rows import Row
from mxq.report import gallery
from mxq.report.comparison_tables import done, told
from mxq.report.page.content import NONE, Cell, Grid, Section, Tone, Verdict, cells
from mxq.report.pictures import Panel, Picture, Point, Series
from mxq.stats import Verdict as Said

ALL = "all workloads"

_TITLES = {
    ACCEPTANCE: "Change of acceptance length (pooled)",
    SURVIVAL: "Change of survival, at the position that decides or else lost most",
    SPEED: "Change of output tokens/s",
}


def verdict_of(comparison: Comparison) -> Verdict:
    """Return the verdict in a word, and what it is of each quantity in a sentence."""
    if comparison.withheld:
        return Verdict("No verdict", "withheld", f"{_capital(comparison.withheld)}.")
    if comparison.verdict is None:
        return Verdict("No verdict", "", "No change has an interval; the table below says why.")
    so_far = "" if comparison.finished else "So far, of a run that is not complete: "
    sides = f"{so_far}{comparison.new_label} against {comparison.base_label}"
    said = "; ".join(
        f"{quantity} {verdict} ({told(comparison, 'quantity', quantity)})"
        for quantity, verdict in comparison.by_quantity.items()
    )
    return Verdict(str(comparison.verdict).capitalize(), _tone(comparison.verdict), f"{sides}. {_capital(said)}.")


def changes_section(comparison: Comparison) -> Section:
    """Return every change with its interval and verdict, cells without one, and how it was done."""
    allowed = tuple(f"Allowed to differ: {one.words}" for one in comparison.unlike)
    grids = [grid for quantity in _TITLES for grid in _grids(comparison, quantity)]
    pictures = (_changes(comparison), *_survival(comparison))
    return Section(
        "changes",
        "What changed",
        warnings=allowed,
        grids=tuple(grids),
        pictures=tuple(picture for picture in pictures if picture.panels),
        after=tuple(_missing(comparison)),
        text=(" ".join(_explained(comparison)),),
        closing=tuple(_closing(comparison)),
    )


def _explained(comparison: Comparison) -> Iterator[str]:
    """Yield how to read an entry."""
    yield (
        f"Each entry is the change from {comparison.base_label} to {comparison.new_label} with its "
        f"{_percent(comparison)} interval and, unless it is withheld, its verdict."
    )
    if any(row.decides for row in comparison.rows):
        yield "Below an undecided one: with how many prompts it would be decided, in one case of two if it stays so."
    if any(row.adjusted != row.verdict for row in comparison.rows):
        yield (
            "(alone: ...) is what an entry says by itself, where Holm's procedure does not uphold it: among so many "
            "entries one like it is expected by chance."
        )


def _closing(comparison: Comparison) -> Iterator[str]:
    """Yield what is to be known of all of it."""
    for workload, (used, total) in comparison.prompts.items():
        if used < total:
            yield f"Not all prompts: {workload} with {used} of {total}."
    yield from comparison.notes
    yield done(comparison).replace("'all'", f"'{ALL}'")


def _grids(comparison: Comparison, quantity: Quantity) -> Iterator[Grid]:
    """Yield the changes of a quantity: a row per configuration, a column per workload, a table per concurrency."""
    mine = [row for row in comparison.rows if row.quantity == quantity]
    for at in sorted({row.concurrency for row in mine}):
        rows = [row for row in mine if row.concurrency == at]
        workloads = list(dict.fromkeys(row.workload for row in rows if row.workload))
        columns: list[str | None] = [*workloads, *([None] if any(row.workload is None for row in rows) else [])]
        lines = []
        for configuration in dict.fromkeys(row.configuration for row in rows):
            found = {row.workload: row for row in rows if row.configuration == configuration}
            entries = [_entry(comparison, found[name]) if name in found else NONE for name in columns]
            lines.append(cells([gallery.titled(configuration), *entries]))
        margin = f"margin {rows[0].margin:g}" if quantity == SURVIVAL else f"margin {100 * rows[0].margin:g} %"
        where = f", {gallery.flight(at)}" if quantity == SPEED else ""
        heads = ("method and K", *(name or ALL for name in columns))
        folded = at > min(row.concurrency for row in mine)
        yield Grid(f"{_TITLES[quantity]}{where}; {margin}", heads, tuple(lines), folded=folded)


def _entry(comparison: Comparison, row: Row) -> Cell:
    change, below = row.change, []
    form, unit, scale = ("{:+.3f}", "", 1) if row.quantity == SURVIVAL else ("{:+.1f}", " %", 100)
    text, lower, upper = (form.format(scale * value) for value in (change.estimate, change.lower, change.upper))
    below.append(f"{lower} to {upper}{unit}" if change.bounded else "no interval")
    if row.position is not None:
        below.append(f"at draft {row.position + 1}")
    if comparison.withheld:
        return Cell(text + unit, "\n".join(below))
    below.append(str(row.adjusted))
    if row.adjusted != row.verdict:
        below.append(f"(alone: {row.verdict})")
    if row.decides:
        below.append(f"~{row.decides:,} prompts")
    return Cell(text + unit, "\n".join(below), _tone(row.adjusted))


def _missing(comparison: Comparison) -> Iterator[Grid]:
    rows = []
    for one in comparison.missing:
        numbers = "" if one.base is None or one.new is None else f"{one.base:.4g} and {one.new:.4g}: "
        rows.append(cells([one.where, f"{numbers}{one.why}"]))
    if rows:
        yield Grid("Without a verdict", ("cell", "why"), tuple(rows), wide=True)


def _changes(comparison: Comparison) -> Picture:
    """Return the changes of acceptance length as bars with intervals, between lines at the margin."""
    mine = [row for row in comparison.rows if row.quantity == ACCEPTANCE and row.change.bounded]
    names = list(dict.fromkeys(row.configuration for row in mine))
    panels = []
    for workload in dict.fromkeys(row.workload for row in mine):
        points = []
        for row in mine:
            if row.workload == workload:
                middle, lower, upper = (100 * v for v in (row.change.estimate, row.change.lower, row.change.upper))
                points.append(Point(names.index(row.configuration), middle, lower, upper))
        panels.append(Panel(workload or ALL, (Series(comparison.new_label, "mxfp4", tuple(points)),)))
    margin = 100 * comparison.margins.acceptance
    return Picture(
        key="changes",
        title="Change of acceptance length",
        x_label="method and K",
        y_label=f"change over {comparison.base_label}, %",
        panels=tuple(panels),
        form="{:+.1f}",
        categories=tuple(map(gallery.titled, names)),
        bottom=None,
        references=(-margin, 0.0, margin),
        intervals=f"{_percent(comparison)} intervals, paired by prompt; dotted: the margin of {margin:g} %",
    )


def _survival(comparison: Comparison) -> Iterator[Picture]:
    """Yield the change of survival by position, of each method at its largest budget."""
    mine = [row for row in comparison.rows if row.quantity == SURVIVAL and row.bands]
    deepest = {row.configuration.partition("-")[0]: row.configuration for row in mine}
    margin = comparison.margins.survival
    for configuration in reversed(deepest.values()):
        panels = []
        for row in mine:
            if row.configuration == configuration and row.bands:
                band = row.bands[2]
                places = [band.at(i) for i in range(len(band.estimate))]
                points = [gallery.point(i + 1, one.estimate, one) for i, one in enumerate(places)]
                curve = Series(comparison.new_label, "mxfp4", tuple(points), "-", "^", band=True)
                panels.append(Panel(row.workload or ALL, (curve,)))
        yield Picture(
            key=f"survival-change-{configuration}",
            title=f"Change of survival, {gallery.titled(configuration)}",
            x_label=f"drafts accepted, at least ({configuration})",
            y_label=f"share of passes, less that of {comparison.base_label}",
            panels=tuple(panels),
            form="{:+.3f}",
            x_ticks=gallery.positions(panels),
            bottom=None,
            references=(-margin, 0.0, margin),
            intervals=f"{_percent(comparison)} bands, each of a whole curve; dotted: the margin of {margin:g}",
        )


def _percent(comparison: Comparison) -> str:
    return f"{100 * comparison.resampling.confidence:g} %"


def _tone(said: Said) -> Tone:
    tones: dict[Said, Tone] = {
        Said.PRESERVED: "preserved",
        Said.DEGRADED: "degraded",
        Said.IMPROVED: "improved",
        Said.UNDECIDED: "undecided",
    }
    return tones[said]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
