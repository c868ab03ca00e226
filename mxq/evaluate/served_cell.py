"""One cell on one server: warmed up, counted while idle before and after, measured, and checked."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from mxq.engines.client import Client, Endpoint, Timeouts, connected
from mxq.engines.metrics import Counters, difference, when_idle
from mxq.engines.process import ServerError
from mxq.evaluate.checks import Check, check_cell
from mxq.evaluate.closed_loop import closed_loop, record_of, warm_up
from mxq.evaluate.matrix import Arm, Cell, Plan, TokenizedWorkload
from mxq.evaluate.records import Record
from mxq.workloads import ChatTemplate

TIMEOUTS = Timeouts()
_IDLE_S = 30.0
"""How long requests of others, and what an engine does after its last answer, may take to end."""

Counted = tuple[Counters | None, str | None]
"""What a server has counted; None if it says nothing, and why."""


async def measure_cell(
    endpoint: Endpoint,
    plan: Plan,
    cell: Cell,
    workload: TokenizedWorkload,
    template: ChatTemplate,
    advance: Callable[[int], None],
) -> tuple[list[Record], dict[str, Any]]:
    """Measure a cell from its start to its end.

    Returns:
        Its records in prompt order, and what is to be noted of it: ``wall_s``, ``counters``, ``passes_from``,
        ``refused``, ``resent``, ``checks``.

    Raises:
        ServerError: a request has no whole answer, the server is not idle, or does not decode as the arm does.
        MxqError: its counts cannot be.
    """
    async with connected(endpoint, TIMEOUTS) as client:
        await warm_up(client, plan, cell.concurrency)
        before = await counted(client)
        check_arm(endpoint, cell.arm, before[0])
        loop = await closed_loop(client, plan, workload, cell.concurrency, cell.repeat, template, advance)
        after = await counted(client)
    records = [record_of(workload, i, cell.arm, sent, template) for i, sent in enumerate(loop.requests)]
    facts: dict[str, Any] = {"wall_s": round(loop.wall_s, 6), "refused": loop.refused, "resent": loop.resent}
    facts |= _counters(before, after)
    by_request = all(record.accepted is not None for record in records)
    if not by_request and facts["counters"] is None:
        raise ServerError(
            f"{endpoint.base_url} says neither per request nor in sum how many drafts are accepted "
            f"({facts['counters_missing']})",
            "start it without --disable-log-stats",
        )
    facts["passes_from"] = "server" if by_request else "counters"
    checks = check_cell(records, cell.arm.num_speculative_tokens, cell.concurrency, facts)
    if loop.refused:
        checks.append(Check("no request was refused", False, f"{loop.refused} were, and sent again after a while"))
    if loop.resent:
        said = f"{loop.resent} met a connection that the server was closing"
        checks.append(Check("no request was sent again", False, said))
    facts["checks"] = [asdict(check) for check in checks]
    return records, facts


async def counted(client: Client) -> Counted:
    """Return what an idle server has counted; raises ServerError if it is lost, or never idle."""
    try:
        await client.counters()
    except ServerError as error:
        if error.lost:
            raise
        return None, error.message
    return await when_idle(client.counters, _IDLE_S), None


def check_arm(endpoint: Endpoint, arm: Arm, counters: Counters | None) -> None:
    """Raise ServerError if a server's counters are those of another way to decode."""
    if counters is None:
        return
    drafts = None if counters.drafts is None else len(counters.per_position)
    if drafts != (arm.num_speculative_tokens or None):
        does = "decodes plainly" if drafts is None else f"drafts {drafts} tokens a pass"
        raise ServerError(f"{endpoint.base_url} {does}: it is not {arm.label}", "compare its --speculative-config")


def _counters(before: Counted, after: Counted) -> dict[str, Any]:
    if before[0] is None or after[0] is None:
        return {"counters": None, "counters_missing": before[1] or after[1]}
    between = difference(before[0], after[0])
    found = asdict(between)
    del found["busy"]
    return {"counters": found}
