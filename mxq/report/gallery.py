"""The pictures of a run: those of the published measurements, and what they leave out, with intervals.

Each is made of a :class:`mxq.analysis.Summary` and of the intervals of its cells, as far as they are known. A picture
that the run has no numbers for has no panels.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from mxq.analysis.intervals import NOTHING, Intervals
from mxq.analysis.summary import CellSummary, Summary
from mxq.evaluate import Arm
from mxq.report.pictures import Colour, Panel, Picture, Point, Series
from mxq.stats import Interval, Repeated

NAMES = {"ar": "plain", "mtp": "MTP", "dflash": "DFlash"}
_LINES = {"ar": ":", "mtp": "--", "dflash": "-"}
_MARKERS = {"ar": ".", "mtp": "s", "dflash": "o"}
_OF_TARGETS = {"bf16": "o", "mxfp4": "^"}
_BUDGETS = "os^Dv"
"""Markers of budgets, from the smallest on, where one method has several."""

_BY_PROMPTS = "intervals over prompts"
_BY_REPEATS = "whiskers are the range over repeats"


def acceptance_vs_k(summary: Summary, intervals: Intervals = NOTHING) -> Picture:
    """Return pooled acceptance length against the budget K, methods by line and targets by colour."""
    budgets = sorted({arm.num_speculative_tokens for arm in summary.run.arms if arm.num_speculative_tokens})
    ceiling = Series("ceiling, K + 1", "guide", tuple(Point(k, k + 1) for k in budgets), ":", "")
    panels = []
    for workload in summary.workloads:
        curves = []
        for method in ("dflash", "mtp"):
            for target in summary.targets:
                points = [
                    point(cell.arm.num_speculative_tokens, cell.acceptance.pooled, intervals.of(cell).pooled)
                    for cell in summary.lowest
                    if (cell.workload, cell.arm.target, cell.arm.method) == (workload, target, method)
                    and cell.acceptance
                ]
                curves.append(_curve(f"{NAMES[method]}, {target}", target, points, _LINES[method], _MARKERS[method]))
        panels.append(_panel(workload, curves, ceiling))
    return Picture(
        key="acceptance-k",
        title="Acceptance length against K",
        x_label="draft tokens per pass, K",
        y_label="acceptance length (pooled), tokens",
        panels=_drawn(panels),
        x_ticks=tuple(budgets),
        intervals=f"{intervals.percent} {_BY_PROMPTS}" if intervals else "",
    )


def survival(summary: Summary, configuration: str, intervals: Intervals = NOTHING) -> Picture:
    """Return the share of verify passes that accepted at least i drafts, bf16 against MXFP4."""

    def points(cell: CellSummary) -> Iterator[Point]:
        if cell.acceptance:
            known = intervals.of(cell).survival
            for i, share in enumerate(cell.acceptance.survival):
                yield point(i + 1, share, known.at(i) if known else None)

    panels = _by_target(summary, [configuration], lambda _, cell: points(cell), band=True)
    return Picture(
        key=f"survival-{configuration}",
        title=f"Survival, {titled(configuration)}",
        x_label=f"drafts accepted, at least ({configuration})",
        y_label="share of verify passes",
        panels=panels,
        x_ticks=positions(panels),
        top=1.02,
        intervals=f"{intervals.percent} bands, each around a whole curve at once" if intervals else "",
    )


def conditional(summary: Summary, configuration: str, intervals: Intervals = NOTHING) -> Picture:
    """Return the share of verify passes that accepted draft i, of those that could."""

    def points(cell: CellSummary) -> Iterator[Point]:
        if cell.acceptance and cell.acceptance.conditional:
            known = intervals.of(cell).conditional
            for i, share in enumerate(cell.acceptance.conditional):
                if share is not None:
                    yield point(i + 1, share, known[i] if known else None)

    panels = _by_target(summary, [configuration], lambda _, cell: points(cell))
    return Picture(
        key=f"conditional-{configuration}",
        title=f"Conditional acceptance, {titled(configuration)}",
        x_label=f"position of the draft ({configuration})",
        y_label="share accepted, of passes at risk",
        panels=panels,
        x_ticks=positions(panels),
        top=1.02,
        intervals=f"{intervals.percent} {_BY_PROMPTS}, at each position by itself" if intervals else "",
    )


def speedups(summary: Summary, concurrency: int, intervals: Intervals = NOTHING) -> Picture:
    """Return the speedup of every configuration over plain decoding by the same target, as bars."""

    def points(place: int, cell: CellSummary) -> Iterator[Point]:
        if cell.speed and (found := cell.speed.speedup_same_precision):
            yield _measured(place, found, intervals.of(cell).speedup)

    return Picture(
        key=f"speedup-{concurrency}",
        title=f"Speedup, {flight(concurrency)}",
        x_label="method and K",
        y_label="speedup over plain decoding",
        panels=_by_target(summary, summary.configurations, points, concurrency),
        form="{:.2f}",
        categories=tuple(titled(name) for name in summary.configurations),
        references=(1.0,),
        intervals=_spread(summary, concurrency, intervals),
    )


def throughput(summary: Summary, concurrency: int, intervals: Intervals = NOTHING) -> Picture:
    """Return output tokens per second of every configuration, bf16 against MXFP4, as bars."""
    configurations = ("ar", *summary.configurations)

    def points(place: int, cell: CellSummary) -> Iterator[Point]:
        if cell.speed:
            yield _measured(place, cell.speed.tokens_per_s, intervals.of(cell).tokens_per_s)

    return Picture(
        key=f"throughput-{concurrency}",
        title=f"Throughput, {flight(concurrency)}",
        x_label="method and K",
        y_label="output tokens/s",
        panels=_by_target(summary, configurations, points, concurrency),
        form="{:.1f}",
        categories=tuple(titled(name) for name in configurations),
        intervals=_spread(summary, concurrency, intervals),
    )


def throughput_vs_k(summary: Summary, concurrency: int, intervals: Intervals = NOTHING) -> Picture:
    """Return output tokens per second against the budget K, with plain decoding as K = 0."""
    panels = []
    for workload in summary.workloads:
        curves = []
        for method in ("dflash", "mtp"):
            for target in summary.targets:
                points = [
                    _measured(cell.arm.num_speculative_tokens, cell.speed.tokens_per_s, intervals.of(cell).tokens_per_s)
                    for cell in summary.cells
                    if (cell.workload, cell.arm.target, cell.concurrency) == (workload, target, concurrency)
                    and cell.arm.method in ("ar", method)
                    and cell.speed
                ]
                name = f"{NAMES[method]}, {target}"
                curves.append(_curve(name, target, points, _LINES[method], _MARKERS[method], least=2))
        panels.append(_panel(workload, curves))
    return Picture(
        key=f"throughput-k-{concurrency}",
        title=f"Throughput against K, {flight(concurrency)}",
        x_label="draft tokens per pass, K (0: plain decoding)",
        y_label="output tokens/s",
        panels=_drawn(panels),
        form="{:.1f}",
        intervals=_spread(summary, concurrency, intervals),
    )


def speed_vs_concurrency(summary: Summary, *, relative: bool = False) -> Picture:
    """Return output tokens per second against requests in flight, with the range over repeats.

    ``relative``: the speedup over plain decoding of the same target instead.
    """

    def value(cell: CellSummary) -> Repeated | None:
        if cell.speed is None or (relative and cell.arm.method == "ar"):
            return None
        return cell.speed.speedup_same_precision if relative else cell.speed.tokens_per_s

    def points(cells: Iterable[CellSummary]) -> list[Point]:
        return [_measured(cell.concurrency, found, None) for cell in cells if (found := value(cell))]

    return Picture(
        key="speedup-flight" if relative else "throughput-flight",
        title="Speedup against requests in flight" if relative else "Throughput against requests in flight",
        x_label="requests in flight",
        y_label="speedup over plain decoding" if relative else "output tokens/s",
        panels=_by_arm(summary, summary.run.arms, points),
        form="{:.2f}" if relative else "{:.1f}",
        x_ticks=summary.concurrencies,
        doubling=True,
        intervals=_BY_REPEATS,
    )


def throughput_vs_latency(summary: Summary, target: str) -> Picture:
    """Return output tokens per second against the time of a token, joined over requests in flight."""

    def points(cells: Iterable[CellSummary]) -> list[Point]:
        found = []
        for cell in cells:
            if cell.speed and cell.speed.latencies and (tpot := cell.speed.latencies.tpot):
                at, rate = 1000 * tpot.median_s, cell.speed.tokens_per_s
                low, high = (rate.lowest, rate.highest) if rate.repeats > 1 else (None, None)
                found.append(Point(at, rate.median, low, high, name=flight(cell.concurrency)))
        return found

    arms = [arm for arm in summary.run.arms if arm.target == target]
    return Picture(
        key=f"latency-{target}",
        title=f"Throughput against latency, {target}",
        x_label="time of an output token (median TPOT), ms",
        y_label="output tokens/s",
        panels=_by_arm(summary, arms, points, least=2),
        form="{:.1f}",
        intervals=_BY_REPEATS,
    )


def titled(configuration: str) -> str:
    """Return a configuration as pictures call it: ``DFlash 15`` for ``dflash-15``."""
    method, _, budget = configuration.partition("-")
    return f"{NAMES[method]} {budget}".strip()


def flight(concurrency: int) -> str:
    """Return how many requests are in flight in words."""
    return "one request at a time" if concurrency == 1 else f"{concurrency} requests in flight"


def _by_target(
    summary: Summary,
    configurations: Sequence[str],
    points: Callable[[int, CellSummary], Iterable[Point]],
    concurrency: int | None = None,
    *,
    band: bool = False,
) -> tuple[Panel, ...]:
    """Return a panel per workload with a series per target: the points of its cells, given the place of each.

    A place is that of the configuration; ``concurrency`` is the lowest by default.
    """
    panels = []
    for workload in summary.workloads:
        curves = []
        for target in summary.targets:
            cells = [summary.cell(target, configuration, workload, concurrency) for configuration in configurations]
            found = [one for place, cell in enumerate(cells) if cell for one in points(place, cell)]
            curves.append(_curve(target, target, found, "-", _OF_TARGETS[target], band=band))
        panels.append(_panel(workload, curves))
    return _drawn(panels)


def _by_arm(
    summary: Summary,
    arms: Sequence[Arm],
    points: Callable[[Iterable[CellSummary]], list[Point]],
    least: int = 1,
) -> tuple[Panel, ...]:
    """Return a panel per workload with a curve per arm, over what differs between an arm's cells."""
    budgets = sorted({arm.num_speculative_tokens for arm in summary.run.arms if arm.num_speculative_tokens})
    panels = []
    for workload in summary.workloads:
        curves = []
        for arm in arms:
            k = arm.num_speculative_tokens
            cells = [cell for cell in summary.cells if (cell.workload, cell.arm) == (workload, arm)]
            cells.sort(key=lambda cell: cell.concurrency)
            name = f"{NAMES[arm.method]}{f' K={k}' if k else ''}, {arm.target}"
            marker = _BUDGETS[budgets.index(k) % len(_BUDGETS)] if k else "."
            curves.append(_curve(name, arm.target, points(cells), _LINES[arm.method], marker, least=least))
        panels.append(_panel(workload, curves))
    return _drawn(panels)


def point(x: float, y: float, known: Interval | None) -> Point:
    """Return a value with its interval; one that reaches to infinity is none."""
    return Point(x, y) if known is None or not known.bounded else Point(x, y, known.lower, known.upper)


def _measured(x: float, value: Repeated, known: Interval | None) -> Point:
    """Return what was measured, with its interval over prompts, else with its range over repeats."""
    if known is not None and known.bounded:
        return Point(x, known.estimate, known.lower, known.upper)
    return Point(x, value.median) if value.repeats == 1 else Point(x, value.median, value.lowest, value.highest)


def _curve(
    name: str,
    target: str,
    points: Sequence[Point],
    line: str = "-",
    marker: str = "o",
    *,
    band: bool = False,
    least: int = 1,
) -> Series | None:
    """Return points as a series; None for fewer than ``least``."""
    if len(points) < least:
        return None
    colour: Colour = "mxfp4" if target == "mxfp4" else "bf16"
    return Series(name, colour, tuple(points), line, marker, band)


def _panel(title: str, curves: Iterable[Series | None], *guides: Series) -> Panel:
    found = [curve for curve in curves if curve]
    return Panel(title, (*guides, *found) if found else ())


def _drawn(panels: Iterable[Panel]) -> tuple[Panel, ...]:
    """Return the panels that have something in them."""
    return tuple(panel for panel in panels if panel.series)


def positions(panels: Iterable[Panel]) -> tuple[float, ...]:
    """Return ticks for draft positions: the first, every fifth, the last."""
    depth = max((point.x for panel in panels for one in panel.series for point in one.points), default=1)
    return tuple(sorted({1.0, *map(float, range(5, int(depth) - 1, 5)), depth}))


def _spread(summary: Summary, concurrency: int, intervals: Intervals) -> str:
    """Return what the intervals of speeds are."""
    if concurrency == 1 and intervals:
        return f"{intervals.percent} {_BY_PROMPTS}"
    repeats = max((cell.repeats for cell in summary.cells if cell.concurrency == concurrency), default=1)
    return _BY_REPEATS if repeats > 1 else "one repeat: nothing tells how far another would be from it"
