"""The tables of how good the MXFP4 target is, for a terminal of 80 columns, with more at 110."""

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mxq.quality import Means, Quality, TextQuality
from mxq.report.speed_tables import empty_table, quoted
from mxq.report.tables import WIDE
from mxq.report.whole import print_whole
from mxq.stats import Interval

ANSWERS = "Quality on the bf16 target's own greedy answers"
TEXTS = "Quality on texts that were given"
_COLUMNS = "\n(perplexities and their ratio, mxfp4 over bf16; KL(bf16 || mxfp4) per token)"
_ALL = "all alike"


def show_quality(quality: Quality, console: Console) -> None:
    """Print all tables and notes; nothing where no quality was measured."""
    if not quality.parts:
        return
    several = quality.overall if len(quality.answers) > 1 else None
    for title, parts, overall in ((ANSWERS, quality.answers, several), (TEXTS, quality.texts, None)):
        if parts:
            console.print(Text(f"{title}{_COLUMNS}", style="bold"))
            print_whole(console, quality_table(parts, overall, console.width))
            console.print()
    for note in notes(quality):
        console.print(quoted(note))


def quality_table(parts: Sequence[TextQuality], overall: Means | None, width: int) -> Table:
    """Return a row for each part and, if there is one, for the mean over all."""
    wide = width >= WIDE
    table = empty_table()
    table.add_column("workload" if parts[0].kind == "answers" else "text", overflow="fold")
    names = ("tokens",) if wide else ()
    for name in (*names, "bf16", "mxfp4", "ratio", "KL, nats", "99 %", "same choice"):
        table.add_column(name, justify="right", no_wrap=True)
    for part in parts:
        most = nats(dict(part.quantiles)[0.99])
        table.add_row(quoted(part.name), *([str(part.tokens)] if wide else []), *_row(part.means, most, wide))
    if overall is not None:
        table.add_row(_ALL, *([""] if wide else []), *_row(overall, "", wide))
    return table


def notes(quality: Quality) -> Iterator[str]:
    """Yield how the numbers came about, for people."""
    if quality.answers:
        read = sum(part.read for part in quality.answers)
        yield (
            f"Perplexity on own answers is of the text that the bf16 target wrote itself, greedily, to the prompts of "
            f"the run ({read} answers): each token is the one that it found likeliest, so it is near 1, and no "
            "perplexity of a corpus compares with it. The prompts are read and not counted."
        )
    for part in quality.texts:
        windows = "one window" if part.read == 1 else f"{part.read} windows"
        yield (
            f"Perplexity on {part.name} is of {part.tokens} tokens of that file, in {windows} of up to {part.window} "
            "tokens that do not overlap; nothing stands before a window, and its first token is not counted."
        )
    yield (
        "KL: divergence of the two distributions of each token at temperature 1, mean over tokens, and what 99 % of "
        "them are below. Same choice: tokens for which both would greedily choose the same. "
        f"{quality.resampling.confidence:.0%} intervals: bootstrap over prompts (texts; of a single text its windows), "
        f"both targets of one drawn together, {quality.resampling.resamples} resamples."
    )
    read, seconds = sum(part.read for part in quality.parts), sum(part.seconds for part in quality.parts)
    yield f"Measuring took {seconds:.1f} s, {seconds / read:.2f} s for each answer or window."


def _row(means: Means, most: str, wide: bool) -> list[str]:
    perplexities = [
        _interval(one, perplexity) if wide else perplexity(one.estimate)
        for one in (means.bf16_perplexity, means.mxfp4_perplexity)
    ]
    return [
        *perplexities,
        _interval(means.ratio, "{:.4f}".format),
        _interval(means.divergence, "{:.4f}".format),
        most,
        _interval(means.agreement, ("{:.2%}" if wide else "{:.1%}").format),
    ]


def perplexity(value: float) -> str:
    """Return a perplexity with as many digits as say something."""
    return f"{value:.4f}" if value < 10 else f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def nats(value: float) -> str:
    """Return a divergence, of which many are nearly none."""
    return f"{value:.4f}" if value >= 0.001 or not value else f"{value:.0e}"


def _interval(one: Interval, form: Callable[[float], str]) -> str:
    """Return an estimate above its interval."""
    ends = f"{form(one.lower)} to {form(one.upper)}" if one.bounded else "no interval"
    return f"{form(one.estimate)}\n{ends}"
