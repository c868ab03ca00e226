"""The tables of a run for a terminal: readable at 80 columns, more detail at 120, plain characters when piped."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mxq.analysis.summary import POINT_ESTIMATES, CellSummary, Summary
from mxq.evaluate.matrix import VLLM
from mxq.report.speed_tables import (
    check_table,
    empty_table,
    kernel_table,
    latency_tables,
    quoted,
    speed_tables,
    withheld_notes,
)
from mxq.report.whole import print_whole
from mxq.stats import Acceptance

_BARS = "▁▂▃▄▅▆▇█"
_TENTHS = "0123456789"  # where there are no such characters
WIDE = 110


def show(summary: Summary, console: Console) -> None:
    """Print all tables, notes and warnings."""
    for warning in summary.warnings:
        console.print(Text.assemble("WARNING: ", quoted(warning), "\n", style="bold red"))
    for title, table in _tables(summary, console.width, _TENTHS if console.options.ascii_only else _BARS):
        # A title can stand alone, over speeds that are withheld.
        checks = bool(table.columns) and table.columns[0].header == "check"
        console.print(Text(title, style="bold red" if summary.failed_checks and checks else "bold"))
        if table.row_count:
            print_whole(console, table)
        console.print()
    for note in notes(summary):
        console.print(quoted(note))


def _tables(summary: Summary, width: int, bars: str) -> Iterator[tuple[str, Table]]:
    if summary.configurations:
        title = "Acceptance length, pooled: tokens committed per verify pass, bonus included"
        yield f"{title}{_at(summary)}", acceptance_table(summary, width)
        for configuration in _deepest(summary.configurations):
            title = f"Survival, {configuration}: share of verify passes that accepted at least i drafts"
            yield title, survival_table(summary, configuration, width, bars)
            if width >= WIDE and (table := conditional_table(summary, configuration, width)).row_count:
                title = f"Conditional acceptance, {configuration}: share that accepted draft i, of the passes at risk"
                yield f"{title} (below: how many)", table
    yield from speed_tables(summary, width)
    yield from latency_tables(summary)
    if any(cell.identity for cell in summary.cells):
        title = "Greedy answers identical, token by token, to plain decoding of the same target"
        yield title, identity_table(summary)
    if any(cell.checked for cell in summary.cells):
        yield "Right answers, of those that have a reference", answers_table(summary)
    if kernels := kernel_table(summary):
        yield "Kernels", kernels
    yield check_table(summary)


def _at(summary: Summary) -> str:
    """Return at how many requests in flight something is, where that is not one and nothing else."""
    return "" if summary.concurrencies == (1,) else f"\n(with {summary.concurrencies[0]} in flight)"


def acceptance_table(summary: Summary, width: int) -> Table:
    """Return pooled acceptance lengths by workload and configuration; per-request means too where there is room."""
    table = empty_table()
    _row_headers(table)
    both = len(summary.targets) == 2
    for target in summary.targets:
        table.add_column(target, justify="right")
    if both:
        table.add_column("difference", justify="right")
    wide = width >= WIDE
    for target in summary.targets if wide else ():
        table.add_column(f"per-request mean (sd), {target}", justify="right")
    for workload, configuration, cells in _rows(summary, summary.configurations):
        found = [cell.acceptance if cell else None for cell in cells]
        row = [workload, configuration, *(_number(a.pooled if a else None, "{:.3f}") for a in found)]
        if both:
            row.append(_difference(found))
        table.add_row(*row, *((_per_request(a) for a in found) if wide else ()))
    return table


def survival_table(summary: Summary, configuration: str, width: int, bars: str = _BARS) -> Table:
    """Return the survival curve of every workload and target, as one of ``bars`` per position and as numbers."""
    found = {
        (workload, target): cell.acceptance
        for workload in summary.workloads
        for target in summary.targets
        if (cell := summary.cell(target, configuration, workload)) and cell.acceptance
    }
    depth = max((len(a.survival) for a in found.values()), default=0)
    both = len(summary.targets) == 2
    names = max(map(len, ("workload", *summary.workloads)))
    # Beside the numbers, 4 columns each, stand two names, the bars, and two gaps.
    taken = names + 1 + 7 + max(depth, 5) + 1 + (17 if both else 0)
    shown = spread(depth, max(2, (width - taken) // 4))
    table = empty_table()
    table.add_column("workload", no_wrap=True)
    table.add_column("target", no_wrap=True)
    table.add_column(f"1..{depth}", no_wrap=True)
    for position in shown:
        table.add_column(str(position + 1), justify="right", no_wrap=True)
    if both:
        table.add_column("mean gap", justify="right")
        table.add_column("largest", justify="right")
    for workload in summary.workloads:
        table.add_section()
        base = found.get((workload, "bf16"))
        for target in summary.targets:
            curve = found.get((workload, target))
            row = [workload if target == summary.targets[0] else "", target]
            row += [_curve(curve, bars), *(_share(curve.survival[i] if curve else None) for i in shown)]
            gaps = [b - a for a, b in zip(base.survival, curve.survival, strict=True)] if base and curve else []
            if both:
                row += _gaps(gaps) if target == "mxfp4" else ["", ""]
            table.add_row(*row)
    return table


def conditional_table(summary: Summary, configuration: str, width: int) -> Table:
    """Return by position what share of the passes that could accept a draft did, and how many could."""
    found = {
        (workload, target): cell.acceptance
        for workload in summary.workloads
        for target in summary.targets
        if (cell := summary.cell(target, configuration, workload)) and cell.acceptance and cell.acceptance.at_risk
    }
    depth = max((len(a.survival) for a in found.values()), default=0)
    digits = max((len(str(max(a.at_risk or ()))) for a in found.values()), default=3)
    names = max(map(len, ("workload", *summary.workloads)))
    shown = spread(depth, max(2, (width - names - 8) // (max(digits, 3) + 1)))
    table = empty_table()
    table.add_column("workload", no_wrap=True)
    table.add_column("target", no_wrap=True)
    for position in shown:
        table.add_column(str(position + 1), justify="right", no_wrap=True)
    for (workload, target), a in found.items():
        row = [f"{_share((a.conditional or ())[i])}\n{(a.at_risk or ())[i]}" for i in shown]
        table.add_row(workload if target == summary.targets[0] else "", target, *row)
    return table


def identity_table(summary: Summary) -> Table:
    """Return how many greedy answers equal those of plain decoding, over all workloads, and where others part."""
    table = empty_table()
    table.add_column("method-K", no_wrap=True)
    for target in summary.targets:
        table.add_column(f"{target} identical", justify="right")
        table.add_column("first differing at", justify="right")
    for configuration in summary.configurations:
        row = [configuration]
        for target in summary.targets:
            cells = [summary.cell(target, configuration, workload) for workload in summary.workloads]
            found = [cell.identity for cell in cells if cell and cell.identity]
            row.append(f"{sum(i.identical for i in found)}/{sum(i.requests for i in found)}" if found else "-")
            row.append(_positions([position for i in found for position in i.first_differences]))
        table.add_row(*row)
    return table


def answers_table(summary: Summary) -> Table:
    """Return how many answers were right, by workload and configuration."""
    table = empty_table()
    _row_headers(table)
    for target in summary.targets:
        table.add_column(target, justify="right")
    for workload in summary.workloads:
        rows = {}
        for configuration in ("ar", *summary.configurations):
            cells = [summary.cell(target, configuration, workload) for target in summary.targets]
            if any(cell and cell.checked for cell in cells):
                rows[configuration] = [_share_right(cell) for cell in cells]
        # Greedy speculation gives the answers of plain decoding: one row then says it all.
        if len(rows) > 1 and all(row == rows["ar"] for row in rows.values()):
            rows = {"all": rows["ar"]}
        for configuration, row in rows.items():
            table.add_row(workload if configuration in ("all", "ar") else "", configuration, *row)
    return table


def notes(summary: Summary) -> Iterator[str]:
    """Yield what the tables do not say: what is missing, cut, counted otherwise or not shown, and why."""
    for workload, (used, total) in summary.prompts.items():
        if used < total:
            yield f"Not complete: {workload} with {used} of {total} prompts so far."
    cells = summary.run.cells
    if not summary.run.finished:
        yield f"Not complete: {sum(cell.finished for cell in cells)} of {len(cells)} cells so far."
    if summary.missing:
        yield f"Nothing yet of {', '.join(arm.label for arm in summary.missing)}."
    for workload, count in summary.conversations.items():
        yield (
            f"{workload} has conversations ({count}): each turn counts as a request. Later turns are sent behind the "
            "arm's own answers, so that arms whose answers differ are not asked the same there."
        )
    cut = sum(cell.cut_by_length for cell in summary.lowest)
    if cut:
        requests = sum(cell.requests for cell in summary.lowest)
        limit = summary.run.info["definition"]["max_tokens"]
        yield f"{cut} of {requests} answers were cut at {limit} tokens."
    yield from _identity_notes(summary)
    lost = [said for cell in summary.run.cells for said in cell.facts.get("lost") or ()]
    if lost:
        yield f"Servers were lost, and their cells measured from the start: {len(lost)}, first: {lost[0]}"
    if any(cell.acceptance and cell.acceptance.source == "counters" for cell in summary.cells):
        yield (
            "Acceptance is from the server's counters, since it does not say what single answers accepted. Drafts "
            "behind an end of text are counted too."
        )
    yield from withheld_notes(summary)
    yield POINT_ESTIMATES


def _identity_notes(summary: Summary) -> Iterator[str]:
    differing = {
        target: sum(len(c.identity.first_differences) for c in summary.lowest if c.arm.target == target and c.identity)
        for target in summary.targets
    }
    float32 = summary.run.info["definition"]["dtype"] == "float32"
    if float32 and differing.get("bf16"):
        yield f"{differing['bf16']} answers of the bf16 target differ in float32: that is a defect of the decoding."
    elif any(differing.values()):
        served = summary.run.info["definition"]["engine"] == VLLM
        yield (
            f"{sum(differing.values())} greedy answers differ from plain decoding: bfloat16, and rounding activations "
            "to MXFP4, can decide near-ties otherwise in passes of another length. "
            + ("A check looks into each." if served else "With --dtype float32 the bf16 target must show none.")
        )


def _row_headers(table: Table) -> None:
    table.add_column("workload", no_wrap=True)
    table.add_column("method-K", no_wrap=True)


def _rows(summary: Summary, configurations: Sequence[str]) -> Iterator[tuple[str, str, list[CellSummary | None]]]:
    for workload in summary.workloads:
        for configuration in configurations:
            name = workload if configuration == configurations[0] else ""
            yield name, configuration, [summary.cell(target, configuration, workload) for target in summary.targets]


def _deepest(configurations: Sequence[str]) -> list[str]:
    """Return each method's configuration with the largest budget: its curve holds the most."""
    largest: dict[str, str] = {}
    for configuration in configurations:
        largest[configuration.rpartition("-")[0]] = configuration
    return list(largest.values())


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _share(value: float | None) -> str:
    """Return a share without the leading zero that would cost every column a place."""
    return "-" if value is None else f"{value:.2f}"[:3] if value >= 0.995 else f"{value:.2f}"[1:]


def _difference(found: Sequence[Acceptance | None]) -> str:
    base, new = found
    if base is None or new is None:
        return "-"
    return f"{new.pooled - base.pooled:+.3f} ({new.pooled / base.pooled - 1:+.1%})"


def _per_request(a: Acceptance | None) -> str:
    if a is None or a.per_request_mean is None:
        return "-"
    spread = "" if a.per_request_sd is None else f" ({a.per_request_sd:.2f})"
    return f"{a.per_request_mean:.3f}{spread}"


def _curve(a: Acceptance | None, bars: str) -> str:
    return "-" if a is None else "".join(bars[min(int(s * len(bars)), len(bars) - 1)] for s in a.survival)


def _gaps(gaps: Sequence[float]) -> list[str]:
    if not gaps:
        return ["-", "-"]
    return [f"{sum(gaps) / len(gaps):+.3f}", f"{max(gaps, key=abs):+.3f}"]


def _share_right(cell: CellSummary | None) -> str:
    return f"{cell.right}/{cell.checked} ({cell.right / cell.checked:.0%})" if cell and cell.checked else "-"


def _positions(positions: Sequence[int]) -> str:
    ordered = sorted(positions)
    if not ordered:
        return "-"
    return ", ".join(map(str, ordered[:3])) + (", ..." if len(ordered) > 3 else "")


def spread(depth: int, room: int) -> list[int]:
    """Return at most ``room`` of ``depth`` positions, first and last included, evenly spread."""
    if depth <= room:
        return list(range(depth))
    return sorted({round(i * (depth - 1) / (room - 1)) for i in range(room)})
