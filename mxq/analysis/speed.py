"""How fast a cell was, over its repeats; and what must not be called the speed of MXFP4."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from mxq.errors import MxqError
from mxq.evaluate import RecordedCell, Run
from mxq.stats import (
    Latencies,
    Repeated,
    Span,
    Throughput,
    decode_tokens_per_s,
    latencies,
    repeated,
    throughput,
)

Repeats = Mapping[int, RecordedCell]
"""The same cell by repeat."""

EMULATED = "emulated"
UNKNOWN = "unknown"
DAMAGED = "damaged"

_DAMAGED = "the run directory is damaged: start a new run"


@dataclass(frozen=True)
class Speed:
    """What :mod:`mxq.stats` says of a cell's times; median and range are over repeats.

    ``latencies`` are over all repeats together, None where nobody waited for pieces. A speedup is this cell's tokens/s
    over those of plain decoding, by the same target and by the bf16 target, at the same concurrency and in the same
    repeat.
    """

    tokens_per_s: Repeated
    decode_tokens_per_s: Repeated | None
    latencies: Latencies | None
    speedup_same_precision: Repeated | None
    speedup_bf16: Repeated | None
    by_repeat: tuple[Throughput, ...]


def speed(mine: Repeats, plain: Repeats, plain_bf16: Repeats) -> Speed:
    """Summarise a cell; ``plain`` and ``plain_bf16`` are its baselines, empty where there is none."""
    rates = {repeat: _throughput(cell) for repeat, cell in mine.items()}
    pooled = repeated([rate.tokens_per_s for rate in rates.values()])
    assert pooled is not None
    decoding = [decode_tokens_per_s(_spans(cell)) for cell in mine.values()]
    records = [record for cell in mine.values() for record in cell.records]
    pieces = [record.arrivals_s for record in records if record.arrivals_s]
    return Speed(
        tokens_per_s=pooled,
        decode_tokens_per_s=repeated([rate for rate in decoding if rate is not None]),
        latencies=latencies(pieces, [r.output_tokens for r in records]) if len(pieces) == len(records) else None,
        speedup_same_precision=_speedup(rates, plain),
        speedup_bf16=_speedup(rates, plain_bf16),
        by_repeat=tuple(rates.values()),
    )


def rate(cell: RecordedCell) -> float:
    """Return a cell's output tokens per second of wall clock."""
    return _throughput(cell).tokens_per_s


def withheld(run: Run, mine: Repeats) -> str | None:
    """Return why the speed of a cell must not be shown; None if it may be.

    "damaged": answers that ran beside others are lost, and the wall clock is that of all of them. For MXFP4,
    "emulated": MXFP4 weights are turned into numbers that the device can multiply, which says nothing about kernels for
    MXFP4. "unknown": nothing tells which kernels were used.
    """
    if any(cell.cut and cell.concurrency > 1 for cell in mine.values()):
        return DAMAGED
    if next(iter(mine.values())).arm.target != "mxfp4":
        return None
    servers = [cell.facts.get("server") for cell in mine.values()]
    if any(servers):
        said = {server.get("mxfp4") if isinstance(server, Mapping) else None for server in servers}
    else:
        said = {run.info["environment"].get("engine", {}).get("mxfp4")}
    return EMULATED if "emulated" in said else UNKNOWN if said != {"native"} else None


def _speedup(rates: Mapping[int, Throughput], plain: Repeats) -> Repeated | None:
    both = rates.keys() & plain.keys()
    return repeated([rates[repeat].tokens_per_s / _throughput(plain[repeat]).tokens_per_s for repeat in sorted(both)])


def _throughput(cell: RecordedCell) -> Throughput:
    where = f"{cell.arm.label} on {cell.workload}, concurrency {cell.concurrency}"
    wall_s = cell.facts.get("wall_s")
    if wall_s is None and cell.concurrency > 1:
        raise MxqError(f"{where}: no wall clock is recorded", _DAMAGED)
    if wall_s is not None and not 0 < wall_s < math.inf:
        raise MxqError(f"{where}: a wall clock of {wall_s} s is recorded", _DAMAGED)
    tokens, seconds = [r.output_tokens for r in cell.records], [r.duration_s for r in cell.records]
    return throughput(tokens, seconds, wall_s)


def _spans(cell: RecordedCell) -> list[Span]:
    """Return requests on one clock; one at a time end to end, since the records' clock has milliseconds only."""
    records = cell.records
    if cell.concurrency == 1:
        sent = list(itertools.accumulate((record.duration_s for record in records), initial=0.0))
    else:
        start = min(record.started_at for record in records)
        sent = [record.started_at - start for record in records]
    return [
        Span(at, at + r.ttft_s, at + (r.arrivals_s[-1] if r.arrivals_s else r.duration_s), r.output_tokens)
        for at, r in zip(sent, records, strict=False)
    ]
