"""A report as one number per line: what spreadsheets and plotting programs take."""

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mxq.analysis.changes import SPEED
from mxq.analysis.intervals import CellIntervals
from mxq.analysis.rows import Row
from mxq.analysis.summary import CellSummary
from mxq.explain import Effects
from mxq.quality import Means, Quality
from mxq.report.page.analysed import Analysed
from mxq.stats import Interval, Percentiles, Repeated

COLUMNS = (
    *("run", "quantity", "unit", "arm", "workload", "concurrency", "position"),
    *("estimate", "lower", "upper", "interval", "n", "verdict"),
)
"""``position`` counts from 1. ``interval`` says what lower and upper are: "prompts" (95 % over prompts), "band" (95 %
around all positions at once), "repeats" (the range over repeats; of a change 95 %), or nothing. ``n`` is of what they
are over; without them it is of requests, of passes at risk for conditional acceptance, and of tokens for quantiles of
the divergence."""

PROMPTS, BAND, REPEATS = "prompts", "band", "repeats"
_FORMULA = tuple("=+-@\t\r")


@dataclass(frozen=True)
class Number:
    """One line, without where it belongs."""

    quantity: str
    unit: str
    estimate: float
    n: int
    lower: float | None = None
    upper: float | None = None
    interval: str = ""
    position: int | None = None
    verdict: str = ""


def write_csv(analysed: Iterable[Analysed]) -> str:
    """Return every number of runs, unrounded, as CSV with a line of names. Text is kept from being a formula."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(COLUMNS)
    for one in analysed:
        for arm, workload, concurrency, number in _numbers(one):
            place = [_safe(text) for text in (one.run.name, number.quantity, number.unit, arm, workload)]
            values = [number.estimate, number.lower, number.upper]
            row = [*place, concurrency, _or_empty(number.position), *map(_or_empty, values)]
            writer.writerow([*row, number.interval, number.n, number.verdict])
    return written.getvalue()


def _of_route(effects: Effects) -> Iterator[Number]:
    quantity, unit = "change of acceptance length on one text", "tokens per pass"
    for name, found in (("", effects.total), (" by features", effects.features), (" by logits", effects.logits)):
        yield _ranged(f"{quantity}{name}", unit, found.estimate, found, found.prompts)


def _of_quality(quality: Quality) -> Iterator[tuple[str, Number]]:
    """Yield numbers with the name of their workload or text; "" is all workloads."""
    for part in quality.parts:
        text = "own answers" if part.kind == "answers" else f"a text in windows of {part.window} tokens"
        for number in _of_means(part.means, text):
            yield part.name, number
        for share, nats in part.quantiles:
            quantity = f"KL divergence of mxfp4 from bf16 on {text}, {share:.0%} of tokens"
            yield part.name, Number(quantity, "nats", nats, part.tokens)
    if quality.overall is not None and len(quality.answers) > 1:
        for number in _of_means(quality.overall, "own answers"):
            yield "", number


def _of_means(means: Means, text: str) -> Iterator[Number]:
    for quantity, unit, found in (
        ("perplexity of bf16", "1", means.bf16_perplexity),
        ("perplexity of mxfp4", "1", means.mxfp4_perplexity),
        ("perplexity of mxfp4 over that of bf16", "ratio", means.ratio),
        ("KL divergence of mxfp4 from bf16", "nats per token", means.divergence),
        ("same choice", "share of tokens", means.agreement),
    ):
        yield _ranged(f"{quantity} on {text}", unit, found.estimate, found, found.prompts)


def _numbers(one: Analysed) -> Iterator[tuple[str, str, int, Number]]:
    for cell in one.summary.cells:
        for number in _of_cell(cell, one.intervals.of(cell)):
            yield cell.arm.label, cell.workload, cell.concurrency, number
    if compared := one.comparison:
        for row in compared.rows:
            sides = f"{compared.new_label} over {compared.base_label}, {row.configuration}"
            for number in _of_row(row, withheld=compared.withheld is not None):
                yield sides, row.workload or "", row.concurrency, number
    for part in one.why.parts:
        for number in _of_route(part.effects):
            yield f"mxfp4 for bf16, {part.configuration}", part.workload, 1, number
    for name, number in _of_quality(one.quality):
        yield "mxfp4 for bf16", name, 1, number


def _of_cell(cell: CellSummary, known: CellIntervals) -> Iterator[Number]:
    if accepted := cell.acceptance:
        n = accepted.requests
        yield _ranged("acceptance length, pooled", "tokens per pass", accepted.pooled, known.pooled, n)
        if accepted.per_request_mean is not None:
            mean = accepted.per_request_mean
            yield _ranged("acceptance length, per-request mean", "tokens per pass", mean, known.per_request_mean, n)
        for i, share in enumerate(accepted.survival):
            at = known.survival.at(i) if known.survival else None
            yield _ranged("survival", "share of passes", share, at, n, kind=BAND, position=i + 1)
        for i, share_at_risk in enumerate(accepted.conditional or ()):
            if share_at_risk is not None and accepted.at_risk:
                at = known.conditional[i] if known.conditional else None
                risk = accepted.at_risk[i]
                quantity, unit = "conditional acceptance", "share of passes at risk"
                yield _ranged(quantity, unit, share_at_risk, at, risk, position=i + 1)
    if speed := cell.speed:
        yield _measured("throughput", "output tokens/s", speed.tokens_per_s, known.tokens_per_s, cell.requests)
        if found := speed.speedup_same_precision:
            yield _measured("speedup over plain, same target", "ratio", found, known.speedup, cell.requests)
        if found := speed.speedup_bf16:
            yield _measured("speedup over plain, bf16", "ratio", found, None, cell.requests)
        if latencies := speed.latencies:
            for name, one in (("TTFT", latencies.ttft), ("TPOT", latencies.tpot), ("ITL", latencies.itl)):
                yield from _latency(name, one)


def _latency(name: str, one: Percentiles | None) -> Iterator[Number]:
    if one is not None:
        for what, seconds in (("mean", one.mean_s), ("median", one.median_s), ("p99", one.p99_s)):
            yield Number(f"{name}, {what}", "s", seconds, one.count)


def _of_row(row: Row, *, withheld: bool) -> Iterator[Number]:
    relative = "ratio - 1"
    verdict = "withheld" if withheld else str(row.adjusted)
    if row.bands:
        for i in range(len(row.bands[2].estimate)):
            at = row.bands[2].at(i)
            yield _ranged(
                "change of survival",
                "share of passes",
                at.estimate,
                at,
                row.prompts,
                kind=BAND,
                position=i + 1,
                verdict=verdict,
            )
        return
    over_repeats = row.concurrency > 1 and row.quantity == SPEED
    kind, n = (REPEATS, row.repeats) if over_repeats else (PROMPTS, row.prompts)
    quantity = f"change of {row.quantity}"
    yield _ranged(quantity, relative, row.change.estimate, row.change, n, kind=kind, verdict=verdict)


def _ranged(
    quantity: str,
    unit: str,
    value: float,
    known: Interval | None,
    n: int,
    *,
    kind: str = PROMPTS,
    position: int | None = None,
    verdict: str = "",
) -> Number:
    if known is None or not known.bounded:
        return Number(quantity, unit, value, n, position=position, verdict=verdict)
    of = n if kind == REPEATS else known.prompts
    return Number(quantity, unit, value, of, known.lower, known.upper, kind, position, verdict)


def _measured(quantity: str, unit: str, value: Repeated, known: Interval | None, n: int) -> Number:
    """Return what was measured with its interval over prompts, else with its range over repeats."""
    if known is not None and known.bounded:
        return Number(quantity, unit, known.estimate, known.prompts, known.lower, known.upper, PROMPTS)
    if value.repeats == 1:
        return Number(quantity, unit, value.median, n)
    return Number(quantity, unit, value.median, value.repeats, value.lowest, value.highest, REPEATS)


def _or_empty(value: float | None) -> str:
    return "" if value is None else repr(value)


def _safe(text: str) -> str:
    """Return text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text
