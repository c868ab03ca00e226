"""A server's own counts, from ``/metrics``: what happened between two moments at which it was idle.

They count for the server as a whole. Differences are those of some requests only if there were no others, and if the
server was idle when both counts were taken.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxq.engines.builds import CACHING, COUNTERS
from mxq.engines.process import ServerError

if TYPE_CHECKING:
    from prometheus_client.samples import Sample


@dataclass(frozen=True)
class Counters:
    """Counts since a server's start, or between two moments.

    Attributes:
        requests: answered ones, whatever ended them.
        output_tokens: of them, and of those that run.
        busy: requests that run or wait at the moment.
        drafts: verify passes with at least one draft; None if the server does not speculate.
        draft_tokens: the drafts in them.
        accepted: how many of these were accepted.
        per_position: in how many passes the draft at each position was.
    """

    requests: int
    output_tokens: int
    busy: int
    drafts: int | None = None
    draft_tokens: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] = ()

    @property
    def acceptance_length(self) -> float | None:
        """The pooled acceptance length, 1 + accepted / drafts; None if nothing was drafted."""
        return 1 + self.accepted / self.drafts if self.drafts else None


def parse(text: str, model: str) -> Counters:
    """Read what ``/metrics`` answers (Prometheus' text format), for one served model, over all its engines.

    Raises ServerError if the text is malformed, or lacks the counts of a vLLM server.
    """
    fields = {name: field for field, name in COUNTERS.items()}
    sums: dict[str, int] = {}
    positions: dict[int, int] = {}
    with _well_formed():
        for sample in _samples(text):
            field = fields.get(sample.name)
            if field is None or sample.labels.get("model_name", model) != model:
                continue
            value = _count(sample.value)
            if field == "per_position":
                position = int(sample.labels["position"])
                positions[position] = positions.get(position, 0) + value
            else:
                sums[field] = sums.get(field, 0) + value
    missing = [COUNTERS[field] for field in ("requests", "output_tokens", "running", "waiting") if field not in sums]
    if missing:
        raise ServerError(f"/metrics has no {missing[0]} of {model}", _HINT)
    if sorted(positions) != list(range(len(positions))):
        raise ServerError("/metrics has accepted tokens of some positions only", _HINT)
    return Counters(
        requests=sums["requests"],
        output_tokens=sums["output_tokens"],
        busy=sums["running"] + sums["waiting"],
        drafts=sums.get("drafts"),
        draft_tokens=sums.get("draft_tokens", 0),
        accepted=sums.get("accepted", 0),
        per_position=tuple(positions[i] for i in range(len(positions))),
    )


def caches_prefixes(text: str) -> bool | None:
    """Tell whether a server caches prefixes, from what ``/metrics`` answers; None if it does not say.

    Raises ServerError if the text is malformed.
    """
    with _well_formed():
        said = {sample.labels.get(CACHING[1]) for sample in _samples(text) if sample.name == CACHING[0]}
    return True if "True" in said else False if said == {"False"} else None


_HINT = "it is the server's own count, on unless it is started with --disable-log-stats; is this vLLM 0.25 or later?"


@contextlib.contextmanager
def _well_formed() -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, IndexError) as error:
        raise ServerError(f"/metrics is not in Prometheus' text format ({error})", _HINT) from None


def _samples(text: str) -> Iterator["Sample"]:
    from prometheus_client.parser import text_string_to_metric_families

    return (sample for family in text_string_to_metric_families(text) for sample in family.samples)


def _count(value: float) -> int:
    if not math.isfinite(value) or value < 0 or value != int(value):
        raise ValueError(f"a count of {value}")
    return int(value)


def difference(before: Counters, after: Counters) -> Counters:
    """Return what happened in between; raises ServerError if the counts went back: another server counts now."""
    if (before.drafts is None) != (after.drafts is None) or len(before.per_position) != len(after.per_position):
        raise ServerError("/metrics counts other things than before", "the server was replaced meanwhile", lost=True)
    made = Counters(
        requests=after.requests - before.requests,
        output_tokens=after.output_tokens - before.output_tokens,
        busy=after.busy,
        drafts=None if before.drafts is None or after.drafts is None else after.drafts - before.drafts,
        draft_tokens=after.draft_tokens - before.draft_tokens,
        accepted=after.accepted - before.accepted,
        per_position=tuple(b - a for a, b in zip(before.per_position, after.per_position, strict=True)),
    )
    if min(made.requests, made.output_tokens, made.drafts or 0, made.accepted, *made.per_position) < 0:
        raise ServerError("/metrics counts less than before", "the server was restarted meanwhile", lost=True)
    return made


async def when_idle(scrape: Callable[[], Awaitable[Counters]], timeout_s: float = 60.0) -> Counters:
    """Return counts at a moment without requests, at which they have stopped to change.

    Args:
        scrape: takes counts.
        timeout_s: how long to wait for such a moment.

    Raises:
        ServerError: there is none: somebody else uses the server.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    last = await scrape()
    while True:
        await asyncio.sleep(_SETTLING_S)
        now = await scrape()
        if now == last and now.busy == 0:
            return now
        if loop.time() > deadline:
            raise ServerError(
                f"the server is not idle: {now.busy} requests that are not ours", "measure on one that nobody else uses"
            )
        last = now


_SETTLING_S = 0.25
