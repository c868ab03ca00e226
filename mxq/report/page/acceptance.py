"""The sections of a report about what was accepted: tables in the published form, curves, positions."""

from collections.abc import Callable, Iterator

from mxq.analysis.intervals import Intervals
from mxq.analysis.summary import CellSummary, Summary
from mxq.report import gallery
from mxq.report.page.content import NONE, Cell, Grid, Section, cells
from mxq.report.pictures import Picture
from mxq.stats import Interval

_POOLED = "Tokens committed per verify pass, bonus token included, over all passes of a workload (pooled)."


def acceptance_section(summary: Summary, intervals: Intervals) -> Section:
    """Return acceptance lengths: a table per target, and the curves against K."""
    grids = [_lengths(summary, intervals, target) for target in summary.targets]
    grids += [_means(summary, intervals, target) for target in summary.targets]
    curves = gallery.acceptance_vs_k(summary, intervals)
    several = any(len(one.points) > 1 for panel in curves.panels for one in panel.series if one.colour != "guide")
    return Section(
        "acceptance",
        "Acceptance length",
        text=(_POOLED + _where(summary),),
        grids=tuple(grid for grid in grids if grid.rows),
        pictures=(curves,) if several else (),
    )


def survival_section(summary: Summary, intervals: Intervals) -> Section:
    """Return survival curves, of each method at its largest budget; the others are in the tables."""
    pictures = tuple(_with_panels(gallery.survival(summary, name, intervals) for name in _deepest(summary)))
    return Section(
        "survival",
        "Survival by position",
        text=(
            "The share of verify passes that accepted at least so many drafts. One plus the sum of a curve is the "
            "pooled acceptance length.",
        ),
        pictures=pictures,
    )


def conditional_section(summary: Summary, intervals: Intervals) -> Section:
    """Return conditional acceptance with the number of passes at risk."""
    names = _deepest(summary)
    pictures = tuple(_with_panels(gallery.conditional(summary, name, intervals) for name in names))
    return Section(
        "conditional",
        "Conditional acceptance",
        text=(
            "Of the passes that accepted every draft before a position and were allowed to accept one there, the share "
            "that did. A pass that ended before (end of text, longest sequence) is not counted as a failure.",
        )
        if pictures
        else (),
        pictures=pictures,
        after=tuple(grid for name in names if (grid := _at_risk(summary, name)).rows) if pictures else (),
    )


def ranged(value: float, known: Interval | None, form: str) -> Cell:
    """Return a number with its interval below; without one where it is not known or reaches to infinity."""
    if known is None or not known.bounded:
        return Cell(form.format(value))
    return Cell(form.format(value), f"{form.format(known.lower)} to {form.format(known.upper)}")


def _lengths(summary: Summary, intervals: Intervals, target: str) -> Grid:
    def entry(cell: CellSummary) -> Cell:
        assert cell.acceptance
        return ranged(cell.acceptance.pooled, intervals.of(cell).pooled, "{:.3f}")

    below = f", and its {intervals.percent} interval over prompts" if intervals else ""
    return _published_form(summary, target, f"Acceptance length, {target}{below}", entry)


def _means(summary: Summary, intervals: Intervals, target: str) -> Grid:
    def entry(cell: CellSummary) -> Cell:
        assert cell.acceptance
        mean = cell.acceptance.per_request_mean
        return NONE if mean is None else ranged(mean, intervals.of(cell).per_request_mean, "{:.3f}")

    caption = f"Per-request mean, {target}: every request weighs alike; not to be compared with the pooled length"
    return _published_form(summary, target, caption, entry, folded=True)


def _published_form(
    summary: Summary, target: str, caption: str, entry: Callable[[CellSummary], Cell], *, folded: bool = False
) -> Grid:
    """Return the form of the published tables: a row per method and K, a column per workload."""
    rows = []
    for configuration in summary.configurations:
        found = [summary.cell(target, configuration, workload) for workload in summary.workloads]
        row = [entry(cell) if cell and cell.acceptance else NONE for cell in found]
        if any(one is not NONE for one in row):
            rows.append(cells([gallery.titled(configuration), *row]))
    return Grid(caption, ("method and K", *summary.workloads), tuple(rows), folded=folded)


def _at_risk(summary: Summary, configuration: str) -> Grid:
    rows, depth = [], 0
    for workload in summary.workloads:
        for target in summary.targets:
            cell = summary.cell(target, configuration, workload)
            if cell and cell.acceptance and cell.acceptance.at_risk:
                depth = len(cell.acceptance.at_risk)
                rows.append(cells([f"{workload} · {target}", *(str(count) for count in cell.acceptance.at_risk)]))
    caption = f"Verify passes at risk by position, {gallery.titled(configuration)}"
    return Grid(caption, ("", *(str(i + 1) for i in range(depth))), tuple(rows), folded=True)


def _where(summary: Summary) -> str:
    at = summary.concurrencies[0]
    return "" if summary.concurrencies == (1,) else f" Measured with {gallery.flight(at)}."


def _deepest(summary: Summary) -> list[str]:
    """Return each method's configuration with the largest budget: its curve holds the most."""
    largest: dict[str, str] = {}
    for configuration in summary.configurations:
        largest[configuration.partition("-")[0]] = configuration
    return list(reversed(largest.values()))


def _with_panels(pictures: Iterator[Picture]) -> Iterator[Picture]:
    return (picture for picture in pictures if picture.panels)
