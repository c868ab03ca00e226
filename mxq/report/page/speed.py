"""The sections of a report about time: speedups, tokens per second, latencies."""

from collections.abc import Callable, Iterator

from mxq.analysis.intervals import Intervals
from mxq.analysis.summary import CellSummary, Summary
from mxq.report import gallery
from mxq.report.page.acceptance import ranged
from mxq.report.page.content import NONE, Cell, Grid, Section, cells
from mxq.report.pictures import Picture
from mxq.report.speed_tables import withheld_notes
from mxq.stats import Interval, Percentiles, Repeated


def speed_sections(summary: Summary, intervals: Intervals) -> Iterator[Section]:
    """Yield speedups and tokens per second of every workload, a section for each number of requests in flight."""
    for at in summary.concurrencies:
        ratios = [grid for target in summary.targets if (grid := _speedups(summary, intervals, target, at)).rows]
        rates = [grid for target in summary.targets if (grid := _rates(summary, intervals, target, at)).rows]
        curves = gallery.throughput_vs_k(summary, at, intervals)
        bars = (gallery.speedups(summary, at, intervals), gallery.throughput(summary, at, intervals))
        pictures = (*bars, curves) if _has_curves(curves) else bars
        yield Section(
            f"speed-{at}",
            f"Speed, {gallery.flight(at)}",
            text=(
                "Throughput is output tokens over the time that they took, prefill included. A speedup is throughput "
                "over that of plain decoding by the same target, with the same prompts and as many requests in flight.",
                *withheld_notes(summary),
            ),
            grids=tuple(ratios),
            pictures=tuple(picture for picture in pictures if picture.panels),
            after=tuple(rates),
        )


def latency_section(summary: Summary) -> Section:
    """Return throughput against latency over requests in flight, where several numbers of them were measured."""
    pictures, grids = [], []
    if len(summary.concurrencies) > 1:
        pictures = [gallery.throughput_vs_latency(summary, target) for target in summary.targets]
    for at in summary.concurrencies:
        grids += [grid for target in summary.targets if (grid := _latencies(summary, target, at)).rows]
    return Section(
        "latency",
        "Latency",
        text=(
            "TTFT is the time to the first token, TPOT that of every later one, ITL the time between two pieces of an "
            "answer: with speculation a piece is what a verify pass commits.",
        )
        if grids
        else (),
        pictures=tuple(picture for picture in pictures if picture.panels),
        after=tuple(grids),
    )


def _speedups(summary: Summary, intervals: Intervals, target: str, at: int) -> Grid:
    def entry(cell: CellSummary) -> Cell:
        found = cell.speed and cell.speed.speedup_same_precision
        return _measured(found, intervals.of(cell).speedup, "{:.2f}") if found else NONE

    caption = f"Speedup over plain decoding of {target}, {gallery.flight(at)}"
    return _by_workload(summary, target, at, caption, entry, summary.configurations)


def _rates(summary: Summary, intervals: Intervals, target: str, at: int) -> Grid:
    def entry(cell: CellSummary) -> Cell:
        return _measured(cell.speed.tokens_per_s, intervals.of(cell).tokens_per_s, "{:.1f}") if cell.speed else NONE

    caption = f"Output tokens/s, {target}, {gallery.flight(at)}"
    return _by_workload(summary, target, at, caption, entry, ("ar", *summary.configurations), folded=True)


def _by_workload(
    summary: Summary,
    target: str,
    at: int,
    caption: str,
    entry: Callable[[CellSummary], Cell],
    configurations: tuple[str, ...],
    *,
    folded: bool = False,
) -> Grid:
    """Return a row per configuration and a column per workload; no row where nothing may be shown."""
    rows = []
    for configuration in configurations:
        found = [summary.cell(target, configuration, workload, at) for workload in summary.workloads]
        if any(cell and cell.speed for cell in found):
            row = [entry(cell) if cell else NONE for cell in found]
            rows.append(cells([gallery.titled(configuration), *row]))
    return Grid(caption, ("method and K", *summary.workloads), tuple(rows), folded=folded)


def _measured(value: Repeated, known: Interval | None, form: str) -> Cell:
    """Return what was measured with its interval over prompts, else with its range over repeats."""
    if known is not None and known.bounded:
        return ranged(known.estimate, known, form)
    if value.repeats == 1:
        return Cell(form.format(value.median))
    return Cell(form.format(value.median), f"{form.format(value.lowest)} to {form.format(value.highest)}")


def _latencies(summary: Summary, target: str, at: int) -> Grid:
    rows = []
    for workload in summary.workloads:
        for configuration in ("ar", *summary.configurations):
            cell = summary.cell(target, configuration, workload, at)
            if cell and cell.speed and (said := cell.speed.latencies):
                found = [text for one in (said.ttft, said.tpot, said.itl) for text in _both(one)]
                rows.append(cells([f"{workload} · {gallery.titled(configuration)}", *found]))
    columns = ("TTFT median", "TTFT p99", "TPOT median", "TPOT p99", "ITL median", "ITL p99")
    return Grid(f"Latencies in ms, {target}, {gallery.flight(at)}", ("", *columns), tuple(rows), folded=True)


def _both(latency: Percentiles | None) -> list[str | Cell]:
    if latency is None:
        return [NONE, NONE]
    return [f"{1000 * seconds:.1f}" for seconds in (latency.median_s, latency.p99_s)]


def _has_curves(picture: Picture) -> bool:
    """Whether some method has two budgets beside plain decoding: two points say nothing that bars do not."""
    return any(len(one.points) > 2 for panel in picture.panels for one in panel.series)
