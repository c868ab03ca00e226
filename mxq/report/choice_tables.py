"""Two tables for a terminal beside the comparison: the fastest configurations of a run, and the published numbers."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mxq.analysis.changes import MEASURED_ONCE, TAKE_TURNS
from mxq.analysis.published import Beside, PublishedRow
from mxq.analysis.speed import DAMAGED, EMULATED
from mxq.analysis.sweep import Choice, Sweep
from mxq.report.speed_tables import empty_table, quoted, rate
from mxq.report.whole import print_whole
from mxq.stats import Interval

_WIDE = 110
ALL = "all"
NOT_PUBLISHED = "not published"

_WITHHELD = {
    EMULATED: "MXFP4 is emulated here: its speed says nothing about MXFP4 kernels, and nothing is recommended.",
    DAMAGED: "records are damaged, and the wall clock of requests side by side is that of all of them.",
}
ONCE = f"{MEASURED_ONCE}. {TAKE_TURNS}"
_UNKNOWN = "no log names the kernels of the MXFP4 target: its speed may be an emulation's, and nothing is recommended."


def show_warnings(warnings: Sequence[str], console: Console) -> None:
    """Print what must be known of a run before any number."""
    for warning in warnings:
        console.print(Text.assemble("WARNING: ", quoted(warning), style="bold red"))


def show_sweep(found: Sweep, confidence: float, console: Console) -> None:
    """Print what to deploy, and the table that it rests on."""
    for choice in found.choices:
        if choice.workload is None or len(_of_place(found, choice)) == 1:
            console.print(recommendation(choice))
    for target, why in found.withheld.items():
        console.print(quoted(f"{target}: {withheld_words(why)}"))
    console.print()
    for target, concurrency in dict.fromkeys((choice.target, choice.concurrency) for choice in found.choices):
        mine = [c for c in found.choices if (c.target, c.concurrency) == (target, concurrency)]
        console.print(quoted(f"Fastest by tokens per second: {target}, {concurrency} in flight"), style="bold")
        print_whole(console, sweep_table(mine, confidence, console.width))
        console.print()
    console.print(
        quoted(
            f"Advantages are relative, with {confidence * 100:g} % intervals, each for itself: over prompts with one "
            "request in flight, over repeats with several ('-': one repeat gives none). =: configurations that the "
            f"fastest is not shown to beat; of these the smallest budget is recommended. '{ALL}': mean over workloads."
        )
    )
    if found.once:
        console.print(quoted(ONCE))


def withheld_words(why: str) -> str:
    """Return why a target has no speed to choose by."""
    return _WITHHELD.get(why, _UNKNOWN)


def recommendation(choice: Choice) -> Text:
    """Return what to deploy in a line, and how sure that is."""
    over, runner_up, own = choice.over_runner_up, choice.runner_up, choice.recommended_over_plain
    words = [] if own is None else [f"{_times(own, what=' plain decoding')}"]
    if over is not None and not over.bounded:
        words.append(f"{_percent(over)} over {runner_up} in one repeat: no interval supports this")
    elif choice.recommended != choice.fastest:
        words.append(f"{choice.fastest} is not shown to be faster, and the smaller budget is taken")
    elif len(choice.ties) > 1:
        words.append(f"not shown to beat {' or '.join(name for name in choice.ties if name != choice.fastest)}")
    elif over is not None and runner_up != "ar":
        words.append(f"{_percent(over)} over {runner_up}")
    where = f"{choice.target}, {choice.concurrency} in flight: take "
    told = f": {'; '.join(words)}" if words else ""
    taken = quoted(choice.recommended)
    taken.stylize("bold green")
    return Text.assemble(quoted(where), taken, quoted(told))


def sweep_table(choices: Sequence[Choice], confidence: float, width: int) -> Table:
    """Return the fastest configuration by workload."""
    table = empty_table()
    wide = width >= _WIDE
    for name in ("workload", "fastest"):
        table.add_column(name, no_wrap=True)
    table.add_column("tok/s", justify="right", no_wrap=True)
    if wide:
        table.add_column(f"{confidence * 100:g} %", justify="right", no_wrap=True)
    table.add_column("runner-up", no_wrap=True)
    table.add_column("advantage", justify="right", no_wrap=True)
    table.add_column("over ar", justify="right", no_wrap=True)
    table.add_column("take", no_wrap=True)
    for choice in choices:
        cells = [choice.workload or ALL, choice.fastest]
        cells.append(rate(choice.tokens_per_s.estimate))
        if wide:
            speed = choice.tokens_per_s
            cells.append(f"{rate(speed.lower)} to {rate(speed.upper)}" if speed.bounded else "-")
        advantage, plain = choice.over_runner_up, choice.over_plain
        tied = "= " if choice.runner_up in choice.ties else ""
        cells += [f"{tied}{choice.runner_up or '-'}", "-" if advantage is None else _percent(advantage, wide=wide)]
        cells += ["-" if plain is None else _times(plain, wide=wide), choice.recommended]
        table.add_row(*map(quoted, cells))
    return table


def show_published(found: Beside, confidence: float, console: Console) -> None:
    """Print a run beside the published acceptance lengths, and in what the two differ."""
    if found.model is None:
        console.print(quoted(f"Nothing was published of this model: {found.matched}."))
    else:
        console.print(quoted(f"Acceptance length beside the published {found.model} ({found.matched})"), style="bold")
        print_whole(console, published_table(found.rows, confidence))
        console.print()
        for unlike in found.unlike:
            console.print(quoted(f"{unlike}."))
        console.print(quoted(f"{NOT_PUBLISHED.capitalize()}: there is no such number, and none is filled in."))
    console.print(quoted(f"Source: {found.source}."))


def published_table(rows: Sequence[PublishedRow], confidence: float) -> Table:
    """Return the run's acceptance lengths with intervals, and the published ones; diff: run - published."""
    table = empty_table()
    for name in ("workload", "method-K", "target"):
        table.add_column(name, no_wrap=True)
    for name in ("run", f"{confidence * 100:g} % interval", "published", "diff"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("inside", no_wrap=True)
    for row in rows:
        ends = f"{row.run.lower:.3f} to {row.run.upper:.3f}" if row.run.bounded else "-"
        cells = [row.workload, row.configuration, row.target, f"{row.run.estimate:.3f}", ends, *_published(row)]
        table.add_row(*map(quoted, cells))
    return table


def _published(row: PublishedRow) -> Iterator[str]:
    if row.published is None or row.difference is None:
        yield from (NOT_PUBLISHED, "-", "-")
        return
    yield from (f"{row.published:.3f}", f"{row.difference:+.3f}")
    yield "-" if row.inside is None else "yes" if row.inside else "no"


def _of_place(found: Sweep, choice: Choice) -> list[Choice]:
    return [c for c in found.choices if (c.target, c.concurrency) == (choice.target, choice.concurrency)]


def _percent(advantage: Interval, *, wide: bool = True) -> str:
    if not advantage.bounded:
        return f"{advantage.estimate:+.1%}"
    ends = f"{advantage.lower:+.1%} to {advantage.upper:+.1%}"
    return f"{advantage.estimate:+.1%} ({ends})" if wide else ends


def _times(advantage: Interval, *, wide: bool = True, what: str = "") -> str:
    if not advantage.bounded:
        return f"{1 + advantage.estimate:.2f}x{what}"
    ends = f"{1 + advantage.lower:.2f} to {1 + advantage.upper:.2f}"
    return f"{1 + advantage.estimate:.2f}x{what} ({ends})" if wide else f"{ends}x"
