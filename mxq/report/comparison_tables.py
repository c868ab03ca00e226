"""The tables of a comparison for a terminal: the verdict first, then what it rests on."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mxq.analysis.changes import ACCEPTANCE, SPEED, SURVIVAL, Missing
from mxq.analysis.comparison import Comparison
from mxq.analysis.rows import Row
from mxq.report.speed_tables import empty_table, quoted, rate
from mxq.report.whole import print_whole
from mxq.stats import Interval, Verdict

ALL = "all"
_Field = Literal["quantity", "configuration"]
_WIDE = 110
_ZERO = re.compile(r"\b0(?=\.)")
_LABEL = 8
"""As long as a side's name may be to stand above a column; longer ones are explained beside the verdict."""

_STYLES = {
    Verdict.PRESERVED: "green",
    Verdict.IMPROVED: "green",
    Verdict.DEGRADED: "bold red",
    Verdict.UNDECIDED: "yellow",
}
_TITLES = {
    ACCEPTANCE: "Acceptance length, pooled: tokens committed per verify pass, bonus included",
    SURVIVAL: "Survival: share of passes that accepted at least i drafts, at the i that decides or else lost most",
    SPEED: "Output tokens per second of wall clock, prefill included",
}


def show(comparison: Comparison, console: Console) -> None:
    """Print what must be known first, the verdict, the tables, and what was done."""
    for warning in comparison.warnings:
        console.print(Text.assemble("WARNING: ", quoted(warning), style="bold red"))
    if comparison.withheld:
        console.print(Text.assemble("NO VERDICT: ", quoted(comparison.withheld), style="bold red"))
    for unlike in comparison.unlike:
        console.print(Text.assemble("ALLOWED TO DIFFER: ", quoted(unlike.words), style="bold"))
    if comparison.warnings or comparison.withheld or comparison.unlike:
        console.print()
    for line in _verdict(comparison):
        console.print(line)
    console.print()
    for title, rows in tables(comparison):
        console.print(Text(title, style="bold"))
        print_whole(console, row_table(comparison, rows, console.width))
        console.print()
    for why in dict.fromkeys(one.why for one in comparison.missing):
        console.print(Text.assemble("Without a verdict: ", quoted(why), style="bold"))
        print_whole(console, missing_table(comparison, [one for one in comparison.missing if one.why == why]))
        console.print()
    for note in (*_notes(comparison), *comparison.notes):
        console.print(quoted(note))
    console.print(quoted(done(comparison)))


def tables(comparison: Comparison) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of each table with its title: by quantity, and tokens per second by requests in flight."""
    for quantity, title in _TITLES.items():
        rows = [row for row in comparison.rows if row.quantity == quantity]
        numbers = sorted({row.concurrency for row in rows})
        if quantity != SPEED:
            if rows:
                yield f"{title}{_flight(numbers)} (margin {_margin(rows[0])})", rows
            continue
        for number in numbers:
            mine = [row for row in rows if row.concurrency == number]
            yield f"{title}, {number} in flight (margin {_margin(mine[0])})", mine


def _flight(numbers: Sequence[int]) -> str:
    """Return at how many requests in flight acceptance was compared, where that is not one."""
    return "" if numbers == [1] else f", {' and '.join(map(str, numbers))} in flight"


def row_table(comparison: Comparison, rows: Sequence[Row], width: int) -> Table:
    """Return the rows of one quantity, with the intervals of both sides where there is room."""
    wide = width >= _WIDE
    quantity = rows[0].quantity
    base, new = _names(comparison)
    percent = f"{comparison.resampling.confidence * 100:g} %"
    table = empty_table()
    table.add_column("workload", overflow="fold")
    table.add_column("method-K", no_wrap=True)
    if quantity == SURVIVAL:
        table.add_column("i", justify="right", no_wrap=True)
    for name in (base, new):
        table.add_column(name, justify="right", no_wrap=True)
        if wide:
            table.add_column(percent, justify="right", no_wrap=True)
    table.add_column("change", justify="right", no_wrap=True)
    table.add_column(f"{percent} {'band' if quantity == SURVIVAL else 'interval'}", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("prompts" if wide else "n", justify="right", no_wrap=True)
    for row in rows:
        names = [row.workload or ALL, row.configuration]
        names += [str((row.position or 0) + 1)] if quantity == SURVIVAL else []
        numbers = []
        for side in (row.base, row.new):
            numbers += [_value(row, side.estimate), *([_ends(row, side)] if wide else [])]
        numbers += [_relative(row, row.change.estimate), _change_ends(row)]
        if not wide and quantity == SURVIVAL:  # the zeros before the point would cost six columns
            numbers = [_ZERO.sub("", number) for number in numbers]
        table.add_row(*map(quoted, (*names, *numbers)), _shown(comparison, row), _prompts(row, wide))
    return table


def missing_table(comparison: Comparison, missing: Sequence[Missing]) -> Table:
    """Return cells that have no row, with their point estimates."""
    table = empty_table()
    table.add_column("workload", overflow="fold")
    table.add_column("method-K", no_wrap=True)
    table.add_column("in flight", justify="right", no_wrap=True)
    table.add_column("what", no_wrap=True)
    for name in _names(comparison):
        table.add_column(name, justify="right", no_wrap=True)
    for one in missing:
        estimates = ["-" if value is None else f"{value:.4g}" for value in (one.base, one.new)]
        cells = [one.workload, one.configuration, str(one.concurrency), one.quantity or "everything", *estimates]
        table.add_row(*map(quoted, cells))
    return table


def done(comparison: Comparison) -> str:
    """Return in a paragraph how intervals and verdicts were made."""
    margins, resampling = comparison.margins, comparison.resampling
    counts = Counter(row.quantity for row in comparison.rows)
    families = ", ".join(f"{count} of {quantity}" for quantity, count in counts.items()) or "none"
    return (
        f"Intervals: bootstrap over prompts ({resampling.resamples} draws of whole conversations, seed "
        f"{resampling.seed}), both sides of a prompt drawn together; {resampling.confidence * 100:g} % for each row, "
        "and for survival for all positions at once. Tokens per second with several requests in flight: Student's t "
        f"over repeats. Margins: {margins.acceptance * 100:g} % of acceptance length, {margins.survival:g} of "
        f"survival, {margins.throughput * 100:g} % of tokens per second. Preserved: the whole interval is inside the "
        "margin; degraded or improved: all of it is beyond, and Holm's procedure upholds that among all rows of the "
        f"quantity ({families}); else undecided. Together: degraded if one row is, else undecided if one is. '{ALL}' "
        "is the mean over workloads, each weighing alike, with prompts drawn within each."
    )


def _verdict(comparison: Comparison) -> Iterator[Text]:
    base, new = comparison.base_label, comparison.new_label
    verdict = comparison.verdict
    word = Text(str(verdict).upper() if verdict else "NONE", style=_STYLES[verdict] if verdict else "bold red")
    names = _names(comparison)
    yield Text.assemble(
        ("Verdict: " if comparison.finished else "Verdict so far: ", "bold"),
        word,
        quoted(f", {names[1]} against {names[0]}"),
    )
    if names != (base, new):
        yield quoted(f"(base: {base}; new: {new})")
    if verdict is None:
        return
    groups: tuple[tuple[_Field, dict[str, Verdict]], ...]
    groups = ("quantity", comparison.by_quantity), ("configuration", comparison.by_configuration)
    for name, verdicts in groups:
        for value, said in verdicts.items():
            rows = told(comparison, name, value)
            yield Text.assemble(quoted(f"  {value}: "), (str(said), _STYLES[said]), f" ({rows})")


def told(comparison: Comparison, field: _Field, value: str) -> str:
    """Return how many rows of a quantity or configuration say what, and how many lengths have no interval."""
    counted = Counter(row.adjusted for row in comparison.rows if getattr(row, field) == value)
    without = sum(one.quantity == ACCEPTANCE and getattr(one, field) == value for one in comparison.missing)
    rows = counted.total()
    kinds = ", ".join(f"{count} {kind}" for kind in Verdict if (count := counted[kind]))
    if without:
        return f"{kinds}, {without} without an interval" if kinds else f"{without} without an interval"
    return "1 row" if rows == 1 else f"all {rows} rows" if len(counted) == 1 else f"{rows} rows: {kinds}"


def _notes(comparison: Comparison) -> Iterator[str]:
    for workload, (used, total) in comparison.prompts.items():
        if used < total:
            yield f"Not all prompts: {workload} with {used} of {total}."
    if comparison.withheld:
        return
    overruled = [row for row in comparison.rows if row.adjusted != row.verdict]
    if overruled:
        yield (
            f"* by itself {' or '.join(sorted({str(row.verdict) for row in overruled}))}; among so many rows that can "
            "be chance, and Holm's procedure does not uphold it."
        )
    if any(row.decides for row in comparison.rows):
        yield "n>N: about N prompts would decide it if the estimate stays, in one case of two."


def _names(comparison: Comparison) -> tuple[str, str]:
    labels = comparison.base_label, comparison.new_label
    return labels if all(len(label) <= _LABEL for label in labels) else ("base", "new")


def _margin(row: Row) -> str:
    return f"{row.margin:g}" if row.quantity == SURVIVAL else f"{row.margin * 100:g} %"


def _value(row: Row, value: float) -> str:
    return rate(value) if row.quantity == SPEED else f"{value:.3f}"


def _ends(row: Row, side: Interval) -> str:
    return f"{_value(row, side.lower)} to {_value(row, side.upper)}" if side.bounded else "-"


def _relative(row: Row, value: float) -> str:
    return f"{value:+.3f}" if row.quantity == SURVIVAL else f"{value:+.1%}"


def _change_ends(row: Row) -> str:
    if math.isinf(row.change.lower) or math.isinf(row.change.upper):
        return "-"
    return f"{_relative(row, row.change.lower)} to {_relative(row, row.change.upper)}"


def _shown(comparison: Comparison, row: Row) -> Text:
    if comparison.withheld:
        return Text("withheld")
    return Text(f"{row.adjusted}{'*' if row.adjusted != row.verdict else ''}", style=_STYLES[row.adjusted])


def _prompts(row: Row, wide: bool) -> str:
    """Return over how many an interval is, and how many would decide."""
    if row.quantity == SPEED and row.concurrency > 1:
        return f"{row.repeats} repeats" if wide else f"{row.repeats}r"
    return f"{row.prompts}>{_about(row.decides)}" if row.decides else str(row.prompts)


def _about(count: int) -> str:
    """Return a number that is an estimate: two digits of it."""
    if count < 1000:
        return str(count)
    return f"{count / 1000:.1f}k" if count < 10_000 else f"{count / 1000:.0f}k"
