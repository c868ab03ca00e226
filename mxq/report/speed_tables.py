"""The tables of a run that are about time: speed, latencies, the kernels behind them; and what the checks say."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from mxq.analysis.checks import tally
from mxq.analysis.speed import DAMAGED, EMULATED, UNKNOWN, Speed
from mxq.analysis.summary import CellSummary, Summary
from mxq.stats import Percentiles, Repeated

Show = Callable[[Speed], str]


def speed_tables(summary: Summary, width: int) -> Iterator[tuple[str, Table]]:
    """Yield tokens per second and speedups, by concurrency where there are several, with ranges over repeats."""
    what = "Output tokens per second of wall clock, prefill included"
    repeats = max(cell.repeats for cell in summary.cells)
    over = f"; median of {repeats} repeats, and their range" if repeats > 1 else ""
    if len(summary.concurrencies) == 1:
        at = summary.concurrencies[0]
        flight = "one request at a time" if at == 1 else f"{at} requests in flight"
        yield f"{what}, {flight}{over}\n(speedup: over plain decoding, ar, of the same precision)", _by_target(summary)
        return
    for target in summary.targets:
        withheld = {cell.throughput_withheld for cell in summary.cells if cell.arm.target == target}
        if None not in withheld:
            yield f"{what}, {target}: {' and '.join(sorted(filter(None, withheld)))}", empty_table()
            continue
        title = f"{what}, {target}, by requests in flight{over}\n(and speedup over plain decoding, ar, of {target})"
        yield from _by_concurrency(summary, target, width, title, _rate_and_speedup)
    if any(cell.speed and cell.arm.target == "mxfp4" and cell.speed.speedup_bf16 for cell in summary.cells):
        title = f"Speedup of mxfp4 over plain decoding of bf16, by requests in flight{over}"
        yield from _by_concurrency(summary, "mxfp4", width, title, lambda s: _spread(s.speedup_bf16, ratio))


def latency_tables(summary: Summary) -> Iterator[tuple[str, Table]]:
    """Yield latencies of servers, at the lowest and the highest concurrency."""
    for at in dict.fromkeys((summary.concurrencies[0], summary.concurrencies[-1])):
        for target in summary.targets:
            cells = [c for c in summary.cells if (c.arm.target, c.concurrency) == (target, at)]
            if any(cell.speed and cell.speed.latencies for cell in cells):
                title = f"Latencies in ms, median and p99; decoding without prefill: {target}, {at} in flight"
                yield title, _latencies(summary, target, at)


def kernels(summary: Summary) -> Mapping[tuple[tuple[str, str], ...], Sequence[str]]:
    """Return what servers said they compute with, as pairs of words, and the arms of each; empty without servers."""
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for cell in summary.run.cells:
        if isinstance(server := cell.facts.get("server"), Mapping):
            arms = found.setdefault(_computing(server, cell.arm.target), [])
            arms += [cell.arm.label] if cell.arm.label not in arms else []
    return found


def kernel_table(summary: Summary) -> Table | None:
    """Return what each arm's server said it computes with, None for a run without servers."""
    found = kernels(summary)
    if not found:
        return None
    table = empty_table()
    for column in ("arms", "what", "as the server says it"):
        table.add_column(column, overflow="fold")
    for computing, arms in found.items():
        table.add_section()
        for number, (what, said) in enumerate(computing):
            table.add_row("" if number else ", ".join(arms), quoted(what), quoted(said))
    return table


def check_table(summary: Summary) -> tuple[str, Table]:
    """Return how many checks passed, and those that did not, by name."""
    counts = tally(summary.checks)
    passed, wrong, unknown = (sum(row[i] for row in counts.values()) for i in range(3))
    table = empty_table()
    table.add_column("check", overflow="fold")
    table.add_column("failed", justify="right")
    table.add_column("not made", justify="right")
    table.add_column("such as", overflow="fold", ratio=1)
    for name, (_, bad, missing) in counts.items():
        if bad or missing:
            first = next(c for c in summary.checks if c.check.name == name and c.check.ok is (False if bad else None))
            example = quoted(f"{first.where}: {first.check.detail}")
            table.add_row(quoted(name), str(bad or "-"), str(missing or "-"), example)
    return f"Checks: {passed} passed, {wrong} failed, {unknown} could not be made", table


def empty_table() -> Table:
    """Return the frame of all tables of a run."""
    return Table(header_style="dim", padding=(0, 1, 0, 0), box=None)


def quoted(text: str) -> Text:
    """Return what a log or a prompt file says as it can be shown: without markup and control characters."""
    return Text("".join(sign for sign in text if sign.isprintable()))


def rate(value: float) -> str:
    """Return tokens per second with four digits or so."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def ratio(value: float) -> str:
    """Return a speedup."""
    return f"{value:.2f}"


def _by_target(summary: Summary) -> Table:
    table = empty_table()
    table.add_column("workload", no_wrap=True)
    table.add_column("method-K", no_wrap=True)
    for target in summary.targets:
        table.add_column(f"{target} tok/s", justify="right")
    for target in summary.targets:
        table.add_column(f"{target} speedup", justify="right")
    if len(summary.targets) == 2:
        table.add_column("mxfp4 over bf16 ar", justify="right")
    for workload in summary.workloads:
        for configuration in ("ar", *summary.configurations):
            cells = [summary.cell(target, configuration, workload) for target in summary.targets]
            row = [workload if configuration == "ar" else "", configuration]
            row += [_shown(cell, lambda s: _spread(s.tokens_per_s, rate)) for cell in cells]
            row += [_shown(cell, lambda s: _spread(s.speedup_same_precision, ratio, "x"), "-") for cell in cells]
            if len(cells) == 2:
                row.append(_shown(cells[1], lambda s: _spread(s.speedup_bf16, ratio, "x"), "-"))
            table.add_row(*row)
    return table


def _by_concurrency(summary: Summary, target: str, width: int, title: str, show: Show) -> Iterator[tuple[str, Table]]:
    """Yield a table with a column per concurrency; several, where one would be wider than the terminal."""
    shown = {
        (cell.workload, cell.arm.configuration, cell.concurrency): _shown(cell, show)
        for cell in summary.cells
        if cell.arm.target == target
    }
    widest = max(len(line) for text in shown.values() for line in text.splitlines())
    names = max(map(len, summary.workloads)) + max(map(len, ("method-K", *summary.configurations))) + 2
    several = len(summary.concurrencies)
    tables = math.ceil(several / max(1, (width - names) // (widest + 1)))
    room = math.ceil(several / tables)
    for start in range(0, several, room):
        table = empty_table()
        table.add_column("workload", no_wrap=True)
        table.add_column("method-K", no_wrap=True)
        columns = summary.concurrencies[start : start + room]
        for at in columns:
            table.add_column(str(at), justify="right", no_wrap=True)
        for workload in summary.workloads:
            for configuration in ("ar", *summary.configurations):
                cells = [shown.get((workload, configuration, at), "-") for at in columns]
                table.add_row(workload if configuration == "ar" else "", configuration, *cells)
        yield title if not start else f"{title.splitlines()[0]}, continued", table


def _rate_and_speedup(speed: Speed) -> str:
    """Return both in a line, and below it their ranges."""
    rates = _spread(speed.tokens_per_s, rate).splitlines()
    ratios = _spread(speed.speedup_same_precision, ratio, "x").splitlines()
    return "\n".join(
        f"{a} {b:>{5 if not number else 10}}" for number, (a, b) in enumerate(zip(rates, ratios, strict=False))
    )


def _latencies(summary: Summary, target: str, at: int) -> Table:
    table = empty_table()
    table.add_column("workload", no_wrap=True)
    table.add_column("method-K", no_wrap=True)
    for name in ("TTFT", "p99", "TPOT", "p99", "ITL", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("decode tok/s", justify="right")
    for workload in summary.workloads:
        for configuration in ("ar", *summary.configurations):
            cell = summary.cell(target, configuration, workload, at)
            said = cell.speed.latencies if cell and cell.speed else None
            several = (said.ttft, said.tpot, said.itl) if said else (None, None, None)
            row = [text for one in several for text in _both(one)]
            row.append(
                _shown(cell, lambda s: "-" if s.decode_tokens_per_s is None else rate(s.decode_tokens_per_s.median))
            )
            table.add_row(workload if configuration == "ar" else "", configuration, *row)
    return table


def _both(latency: Percentiles | None) -> list[str]:
    return ["-", "-"] if latency is None else [_ms(latency.median_s), _ms(latency.p99_s)]


def _ms(seconds: float) -> str:
    value = seconds * 1000
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _shown(cell: CellSummary | None, show: Show, withheld: str | None = None) -> str:
    """Return a number of a cell, or why there is none."""
    if cell is None:
        return "-"
    if cell.speed is None:
        return withheld or cell.throughput_withheld or "-"
    return show(cell.speed)


def _spread(value: Repeated | None, form: Callable[[float], str], unit: str = "") -> str:
    if value is None:
        return "-"
    middle = f"{form(value.median)}{unit}"
    return middle if value.repeats == 1 else f"{middle}\n{form(value.lowest)}-{form(value.highest)}"


def _computing(server: Mapping[str, object], target: str) -> tuple[tuple[str, str], ...]:
    """Return which program, and which kernels, as pairs of words."""
    found = [("server", " ".join(str(server[key]) for key in ("build", "version", "url") if server.get(key)))]
    kernels = server.get("kernels")
    for what, said in kernels.items() if isinstance(kernels, Mapping) else ():
        names = said if isinstance(said, Sequence) and not isinstance(said, str) else [said]
        if text := ", ".join(dict.fromkeys(str(name) for name in names if name)):
            found.append((str(what), text))
    if target == "mxfp4":
        found.append(("mxfp4", str(server.get("mxfp4") or "the log names no kernel of it")))
    remarks = server.get("remarks")
    found += [("remark", str(said)) for said in (remarks if isinstance(remarks, list) else ())]
    return tuple(found)


def withheld_notes(summary: Summary) -> Iterator[str]:
    """Yield why speeds are not there."""
    why = {cell.throughput_withheld for cell in summary.cells} - {None}
    if EMULATED in why:
        yield (
            "MXFP4 is emulated here: its acceptance is that of the quantized model, its speed would say nothing about "
            "MXFP4 kernels and is not shown."
        )
    if UNKNOWN in why:
        yield (
            "No log names the kernels of the MXFP4 target, so its speed may be an emulation's and is not shown: let "
            "mxq start the server."
        )
    if DAMAGED in why:
        yield "Where records are damaged, requests side by side have no speed: the wall clock is that of all of them."
