"""Checks of one cell: what is counted twice must agree, and what was measured must be possible.

A server counts for itself (``/metrics``), and says of each answer what it was: two ways to the same sums. Pure: records
and facts go in, so that a cell can be checked again from its directory.

What may differ, and by how much, follows from vLLM's scheduler (v1/core/sched/scheduler.py, update_from_output):

* A pass is counted in full before its answer is looked at, so also drafts that were accepted behind an end of text,
  which records leave out. These are some of the drafts behind the last one that a record has accepted, if that one was
  the end; nothing else of the counts of drafts may differ.
* Tokens are counted after an answer was cut at its end of text or at its limit: the same in both.
* A pass without drafts (near the model's longest sequence, or after a preemption) is no verify pass in either count.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mxq.evaluate.records import Record

DRAFTS_ACCEPTED = "drafts are accepted"

_ROUNDING_S = 1e-4
"""Times are kept in microseconds, and the wall clock is not read in the very moment that an answer ends."""

_BETWEEN, _BETWEEN_S = 0.1, 0.01
"""How much of the wall clock may pass without a request in flight: a share of it, and seconds for each request."""


@dataclass(frozen=True)
class Check:
    """One check: ``ok`` is None where what it needs is not there; ``detail`` says the numbers, or what is missing."""

    name: str
    ok: bool | None
    detail: str

    @property
    def failed(self) -> bool:
        """Whether it was made and found something wrong."""
        return self.ok is False


def check_cell(
    records: Sequence[Record], num_speculative_tokens: int, concurrency: int = 1, facts: Mapping[str, Any] | None = None
) -> list[Check]:
    """Make every check that a finished cell allows.

    Args:
        records: of all its prompts.
        num_speculative_tokens: the arm's budget K, 0 for plain decoding.
        concurrency: requests in flight.
        facts: what cell.json says of a cell that a server answered (``wall_s``, ``counters``, ``counters_missing``);
            without them only what records say of themselves is checked.
    """
    facts = facts or {}
    made = [_tokens(records), *_times(records, concurrency, facts.get("wall_s"))]
    counters = facts.get("counters")
    if counters is not None:
        made += _counts(records, counters)
    elif facts.get("wall_s") is not None:
        made.append(Check("server counters", None, str(facts.get("counters_missing") or "the server has none")))
    if not num_speculative_tokens:
        if counters is not None and counters["drafts"]:
            made.append(Check("verify passes", False, f"server {counters['drafts']}, in plain decoding"))
    else:
        known = all(record.accepted is not None for record in records)
        if counters is not None:
            made += _speculation(records if known else None, counters, num_speculative_tokens)
            if not known and counters["drafts"] is not None:
                made.append(_accounted(records, counters, num_speculative_tokens))
        made.append(_accepts(records if known else None, counters))
    return made


def _tokens(records: Sequence[Record]) -> Check:
    counted, sent = sum(r.output_tokens for r in records), sum(len(r.token_ids) for r in records)
    wrong = [r.prompt_id for r in records if r.output_tokens != len(r.token_ids)]
    where = f"; not of {', '.join(wrong[:3])}" if wrong else ""
    return Check("token ids", not wrong, f"{counted} tokens counted, {sent} ids{where}")


def _times(records: Sequence[Record], concurrency: int, wall_s: float | None) -> Iterator[Check]:
    def possible(r: Record) -> bool:
        at = (0.0, *(r.arrivals_s or (r.ttft_s,)), r.duration_s)
        ordered = all(a <= b + _ROUNDING_S for a, b in itertools.pairwise(at))
        return ordered and r.ttft_s > 0 and len(r.arrivals_s or ()) <= r.output_tokens

    wrong = [r.prompt_id for r in records if not possible(r)]
    yield Check(
        "times of answers",
        not wrong,
        f"impossible: {', '.join(wrong[:3])}" if wrong else "first token, pieces and end follow each other",
    )
    if wall_s is not None and records:
        longest, total = max(r.duration_s for r in records), sum(r.duration_s for r in records)
        # Never more than `concurrency` in flight, so that this is the most that answers can take together.
        ok = longest <= wall_s + _ROUNDING_S and total <= concurrency * (wall_s + _ROUNDING_S)
        # And never none, but for the moments between an answer and the next request.
        ok = ok and wall_s - total <= _BETWEEN * wall_s + _BETWEEN_S * len(records)
        together = total / wall_s if wall_s > 0 else float("inf")
        yield Check(
            "wall clock", ok, f"{wall_s:.3f} s, longest answer {longest:.3f} s, {together:.2f} in flight on average"
        )


def _counts(records: Sequence[Record], counters: Mapping[str, Any]) -> Iterator[Check]:
    yield _equal("requests", counters["requests"], len(records))
    yield _equal("output tokens", counters["output_tokens"], sum(r.output_tokens for r in records))


def _speculation(
    records: Sequence[Record] | None, counters: Mapping[str, Any], num_speculative_tokens: int
) -> Iterator[Check]:
    drafts, accepted, at = counters["drafts"], counters["accepted"], tuple(counters["per_position"])
    if drafts is None:
        yield Check("verify passes", False, "the server counts none: it does not speculate")
        return
    if records is not None:
        passes = [pair for r in records for pair in zip(r.accepted or (), r.drafted or (), strict=True) if pair[1]]
        yield _equal("verify passes", drafts, len(passes))
        yield _equal("drafts", counters["draft_tokens"], sum(drafted for _, drafted in passes))
        behind = [_behind_the_end(r) for r in records]
        found = [sum(a > i for a, _ in passes) for i in range(len(at))]
        most = [n + sum(i in span for span in behind) for i, n in enumerate(found)]
        yield Check(
            "accepted drafts",
            sum(found) <= accepted <= sum(most),
            f"server {accepted}, records {sum(found)}{_leeway(sum(most) - sum(found))}",
        )
        outside = [i + 1 for i, n in enumerate(at) if not found[i] <= n <= most[i]]
        yield Check(
            "accepted by position",
            not outside,
            "; ".join(f"position {i}: server {at[i - 1]}, records {found[i - 1]}" for i in outside[:3])
            or f"{len(at)} positions agree",
        )
    possible = len(at) == num_speculative_tokens and all(a >= b for a, b in zip((drafts, *at), at, strict=False))
    pooled = 1 + accepted / drafts if drafts else None
    summed = 1 + sum(at) / drafts if drafts else None
    yield Check(
        "acceptance length is 1 + sum of survival",
        possible and accepted == sum(at),
        "no verify pass"
        if pooled is None
        else f"server's counters: {pooled:.4f} and {summed:.4f}, over {len(at)} positions",
    )


def _behind_the_end(record: Record) -> range:
    """Return the positions of drafts behind an end of text that was an accepted draft itself: some may be accepted."""
    passes = record.passes
    if passes is None or not passes.accepted or not record.drafted:
        return range(0)
    # Statistics censor exactly these, see Record.passes.
    return range(passes.drafted[-1], record.drafted[-1])


def _accounted(records: Sequence[Record], counters: Mapping[str, Any], num_speculative_tokens: int) -> Check:
    """Check the counters alone: an answer is its prompt's token, and of each pass the drafts and one more.

    Only its last pass is cut, at the end of text or at the limit; and only close to the model's longest sequence, where
    there is no room for K drafts, are passes made without any.
    """
    tokens = sum(r.output_tokens for r in records)
    made = len(records) + counters["drafts"] + counters["accepted"]
    most = len(records) * num_speculative_tokens
    return Check(
        "tokens of the passes",
        abs(made - tokens) <= most,
        f"{len(records)} requests, {counters['drafts']} passes and {counters['accepted']} drafts make {made}; "
        f"{tokens} came, which may be up to {most} fewer or more",
    )


def _accepts(records: Sequence[Record] | None, counters: Mapping[str, Any] | None) -> Check:
    """Alarm at an acceptance length of exactly 1: the drafter is there and does nothing."""
    if records is not None:
        passes, accepted = sum(len(r.accepted or ()) for r in records), sum(sum(r.accepted or ()) for r in records)
    else:
        passes, accepted = (counters["drafts"] or 0, counters["accepted"]) if counters is not None else (0, 0)
    if not passes:
        return Check(DRAFTS_ACCEPTED, None, "no verify pass is known")
    return Check(DRAFTS_ACCEPTED, accepted > 0, f"{accepted} in {passes} verify passes: {1 + accepted / passes:.3f}")


def _equal(name: str, server: int, records: int) -> Check:
    return Check(name, server == records, f"server {server}, records {records}")


def _leeway(most: int) -> str:
    return f" (and up to {most} behind ends of text)" if most else ""
