"""The tables of why acceptance changed, for a terminal of 80 columns, with more at 120."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mxq.explain import Effects, Explained, Why
from mxq.explain.effects import mean_drift
from mxq.explain.record import EDGES
from mxq.explain.results import CORNER_NAMES
from mxq.report.speed_tables import empty_table, quoted
from mxq.report.tables import WIDE, spread
from mxq.report.whole import print_whole
from mxq.stats import ENOUGH, Band, Interval

_ALL = "all alike"


def show_why(why: Why, console: Console) -> None:
    """Print all tables and notes; nothing where nothing is explained."""
    if not why.parts:
        return
    for title, table in _tables(why, console.width):
        console.print(Text(title, style="bold"))
        print_whole(console, table)
        console.print()
    for note in notes(why):
        console.print(quoted(note))


def _tables(why: Why, width: int) -> Iterator[tuple[str, Table]]:
    title = "Why it changed: acceptance length by drafter's features and verifier's logits, on one text"
    title += "\n(change from bf16 for both to mxfp4 for both, and its part by either route"
    title += "; columns: features over logits)" if width >= WIDE else ")"
    yield title, route_table(why, width)
    for configuration in why.overall:
        parts = [part for part in why.parts if part.configuration == configuration]
        title = f"Which drafts pay, {configuration}: change of survival by either route"
        yield f"{title} (*: the band excludes 0)", position_table(parts, width)
    yield "The verifier: MXFP4 against bf16 behind the same tokens", verifier_table(why, width)
    for configuration in why.overall:
        parts = [part for part in why.parts if part.configuration == configuration]
        title = f"What the drafter reads, {configuration}: drift from bf16 to MXFP4, mean over workloads"
        yield f"{title}\n(relative error also over the prompt, and by token of the answer)", drift_table(parts)


def route_table(why: Why, width: int) -> Table:
    """Return lengths in the corners and effects, by workload and configuration; all corners where there is room."""
    wide = width >= WIDE
    table = empty_table()
    table.add_column("workload", overflow="fold")
    table.add_column("method-K", no_wrap=True)
    shown = range(4) if wide else (0,)
    for corner in shown:
        features, logits = CORNER_NAMES[corner]
        table.add_column(f"{features}\n{logits}" if wide else "bf16", justify="right", no_wrap=True)
    for name in ("change", "by features", "by logits", *(("interaction",) if wide else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("route")
    for part in why.parts:
        lengths = [f"{part.lengths[corner].estimate:.2f}" for corner in shown]
        table.add_row(quoted(part.workload), part.configuration, *lengths, *_effects(part.effects, wide))
    for configuration, effects in why.overall.items() if len({part.workload for part in why.parts}) > 1 else ():
        table.add_row(_ALL, configuration, *("" for _ in shown), *_effects(effects, wide))
    return table


def position_table(parts: Sequence[Explained], width: int) -> Table:
    """Return by draft position what either route does to survival; the survival in all corners where there is room."""
    depth = parts[0].num_speculative_tokens
    names = max(map(len, ("workload", *(part.workload for part in parts))))
    wide = width >= WIDE
    shown = spread(depth, max(2, (width - names - (24 if wide else 11)) // 6))
    table = empty_table()
    table.add_column("workload", overflow="fold")
    table.add_column("", no_wrap=True)
    for position in shown:
        table.add_column(str(position + 1), justify="right", no_wrap=True)
    for part in parts:
        table.add_section()
        first = True
        for (features, logits), survival in zip(CORNER_NAMES, part.survival, strict=True) if wide else ():
            label = f"{features} x {logits}"
            table.add_row(quoted(part.workload) if first else "", label, *(f"{survival[i]:.2f} " for i in shown))
            first = False
        for label, effect in (("features", part.features), ("logits", part.logits)):
            table.add_row(quoted(part.workload) if first else "", label, *(_at(effect, i) for i in shown))
            first = False
    return table


def verifier_table(why: Why, width: int) -> Table:
    """Return divergence and flips by workload."""
    table = empty_table()
    table.add_column("workload", overflow="fold")
    wide = width >= WIDE
    for name in ("tokens",) if wide else ():
        table.add_column(name, justify="right")
    for name in ("KL, nats", "median", "90 %", "99 %", "flips", "gap bf16", "mxfp4", "else"):
        table.add_column(name, justify="right", no_wrap=True)
    for part in {part.workload: part for part in why.parts}.values():
        flips = part.flips
        table.add_row(
            quoted(part.workload),
            *((str(part.tokens),) if wide else ()),
            _interval(part.divergence.mean, "{:.4f}" if wide else "{:.3f}"),
            *(f"{nats:.3f}" if nats >= 0.001 else f"{nats:.0e}" for _, nats in part.divergence.quantiles),
            _interval(flips.share, "{:.1%}"),
            *(_number(gap, "{:.2f}") for gap in (flips.bf16_gap, flips.mxfp4_gap, flips.elsewhere)),
        )
    return table


def drift_table(parts: Sequence[Explained]) -> Table:
    """Return the drift of each thing that is read, over all workloads' tokens."""
    table = empty_table()
    table.add_column("read", no_wrap=True)
    table.add_column("cosine", justify="right")
    table.add_column("error", justify="right")
    table.add_column("prompt", justify="right")
    for begin, end in zip(EDGES, (*EDGES[1:], None), strict=True):
        table.add_column(f"{begin + 1}-{end}" if end else f"{begin + 1}-", justify="right")
    for index, read in enumerate(parts[0].drift):
        answers = mean_drift([part.drift[index].answers for part in parts])
        ranges = [mean_drift([part.drift[index].ranges[r] for part in parts]) for r in range(len(read.ranges))]
        assert answers is not None
        errors = ["-" if part is None else f"{part.error:.3f}" for part in ranges]
        table.add_row(quoted(read.name), f"{answers.cosine:.4f}", f"{answers.error:.3f}", *errors)
    return table


def notes(why: Why) -> Iterator[str]:
    """Yield how the numbers came about, for people."""
    sampled = {(part.workload, part.prompts, part.places) for part in why.parts}
    prompts, places = (sum(count) for count in zip(*((prompts, places) for _, prompts, places in sampled), strict=True))
    each = "behind every token" if why.parts[0].every == 1 else f"behind one token of {why.parts[0].every}"
    yield (
        f"All on the bf16 target's own greedy answers: {each}, {places} places of {prompts} answers, a drafter that "
        "has read either target drafts, and either target judges. Passes of decoding begin elsewhere, so lengths are "
        "not those of the tables of acceptance."
    )
    yield (
        f"{why.resampling.confidence:.0%} intervals: bootstrap over prompts, all corners of a prompt drawn together, "
        f"{why.resampling.resamples} resamples; each holds for its row alone. The two parts add up to the change. "
        f"Route: what has an interval below 0, where that of the change is; from {ENOUGH} prompts on. Gaps in logits "
        "are medians: at flips, by how much each target prefers its own token; elsewhere, by how much bf16 prefers its "
        "best."
    )


def _effects(effects: Effects, wide: bool) -> list[str]:
    found = [effects.total, effects.features, effects.logits, *([effects.interaction] if wide else [])]
    return [*(_interval(one, "{:+.2f}") for one in found), effects.route]


def _interval(one: Interval, form: str) -> str:
    """Return an estimate above its interval."""
    ends = f"{form.format(one.lower)} to {form.format(one.upper)}" if one.bounded else "no interval"
    return f"{form.format(one.estimate)}\n{ends}"


def _at(effect: Band, position: int) -> str:
    there = effect.at(position)
    text = f"{there.estimate:+.2f}"
    text = text[0] + text[2:] if text[1] == "0" else text
    return f"{text}{'*' if there.bounded and not there.holds(0) else ' '}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
