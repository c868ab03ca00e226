"""A workload sent to a server with so many requests in flight: a closed loop, as ``vllm bench serve`` does it.

Each of the loop's workers takes the next conversation and sends its turns one after the other, a later one behind the
arm's own answers. Token ids are sent, the same that decoding in process sees, so that no server's template or tokenizer
comes in between. What can wait is done after the last answer: this process shares its processors with the server.
"""

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mxq.engines import Completion
from mxq.engines.answers import Answer, Received
from mxq.engines.client import Client
from mxq.engines.process import ServerError
from mxq.evaluate.matrix import Arm, Plan, TokenizedWorkload
from mxq.evaluate.records import Record
from mxq.evaluate.runner import WARM_UP_TOKENS, check, prompt_ids, seed_of, sent_sha256
from mxq.workloads import ChatTemplate

MOST_REFUSED = 3
"""How often a server may say that it has too much to do (429, 503) before a cell is given up."""

_TOO_MUCH = (429, 503)
_BACKOFF_S = 0.5
_MOST_UNREAD = 1 << 27
"""Bytes of answers that wait for the last one to be read: those of some 400,000 tokens."""


@dataclass(frozen=True)
class Sent:
    """A request with its answer as it came; ``started_at`` in seconds since the epoch."""

    ids: Sequence[int]
    started_at: float
    received: Received

    @cached_property
    def answer(self) -> Answer:
        """The answer, once it is read; raises ServerError if it is not a whole one."""
        answer = self.received.answer()
        if answer.token_ids is None:
            raise ServerError("the server does not send the ids of tokens", "it must be vLLM 0.10.2 or later")
        if answer.prompt_tokens != len(self.ids):
            raise ServerError(f"the server counted {answer.prompt_tokens} tokens in a prompt of {len(self.ids)}")
        return answer


@dataclass(frozen=True)
class Loop:
    """What a closed loop gave: requests in prompt order, first request sent to last answer ended; see Asking."""

    requests: tuple[Sent, ...]
    wall_s: float
    refused: int
    resent: int


class Asking:
    """Sends requests to one server; those that it refuses for now are sent again, and counted.

    The waiting is part of the wall clock, so a cell with refused requests says so; a few are all that is put up with.
    Counted as ``resent`` is what was sent into a connection that the server was closing, and is sent a second time.
    """

    def __init__(self, client: Client, plan: Plan) -> None:
        self._client, self._settings = client, plan.settings
        self.refused = self.resent = 0

    async def ask(self, ids: Sequence[int], max_tokens: int, seed: int = 0) -> Sent:
        """Send one request; raises ServerError."""
        stop = list(self._settings.eos_token_ids)
        again = False
        while True:
            started_at = time.time()
            try:
                received = await self._client.receive(
                    ids, max_tokens=max_tokens, sampling=self._settings.sampling, seed=seed, stop_token_ids=stop
                )
            except ServerError as error:
                if error.unanswered and not again:
                    again = True
                    self.resent += 1
                    continue
                if error.lost or error.status not in _TOO_MUCH or self.refused == MOST_REFUSED:
                    raise
                self.refused += 1
                await asyncio.sleep(_BACKOFF_S * 2**self.refused)
                continue
            return Sent(ids, started_at, received)


async def warm_up(client: Client, plan: Plan, concurrency: int) -> None:
    """Send as many requests at once as will be measured, of prompts that none of the workloads has."""
    asking = Asking(client, plan)
    tokens = min(WARM_UP_TOKENS, plan.settings.max_tokens)

    async def ask(ids: Sequence[int]) -> None:
        _ = (await asking.ask(ids, tokens)).answer

    await _together(ask(ids) for ids in plan.warm_ups[:concurrency])


async def closed_loop(
    client: Client,
    plan: Plan,
    workload: TokenizedWorkload,
    concurrency: int,
    repeat: int,
    template: ChatTemplate,
    advance: Callable[[int], None],
) -> Loop:
    """Send every prompt of a workload, ``concurrency`` of them at a time; ``advance`` is called as answers come.

    Raises ServerError for the first request that has no whole answer; the others are then given up. What only reading
    an answer shows is raised when all have come.
    """
    asking = Asking(client, plan)
    done: list[Sent | None] = [None] * len(workload.token_ids)
    texts = [""] * len(done)
    waiting = _conversations(workload)
    unread = 0

    async def work() -> None:
        nonlocal unread
        for positions in waiting:
            for position in positions:
                ids = prompt_ids(workload, position, texts, template.encode)
                seed = seed_of(plan, workload, position, repeat)
                done[position] = sent = await asking.ask(ids, plan.settings.max_tokens, seed)
                unread += sent.received.unread
                if unread > _MOST_UNREAD:
                    _ = sent.answer
                if position + 1 in positions:
                    texts[position] = template.decode(sent.answer.token_ids or ())
                advance(1)

    with undisturbed():
        begin = time.perf_counter()
        await _together(work() for _ in range(concurrency))
        wall_s = time.perf_counter() - begin
    requests = tuple(sent for sent in done if sent is not None)
    for sent in requests:
        _ = sent.answer
    assert len(requests) == len(done)
    return Loop(requests, wall_s, asking.refused, asking.resent)


def record_of(workload: TokenizedWorkload, position: int, arm: Arm, sent: Sent, template: ChatTemplate) -> Record:
    """Return the record of a request; raises MxqError where the server's counts cannot be."""
    prompt, answer = workload.workload.prompts[position], sent.answer
    assert answer.token_ids is not None
    passes = answer.passes() if arm.method != "ar" else ()
    arrivals = tuple(round(at, 6) for at in answer.arrivals_s)
    completion = Completion(
        token_ids=answer.token_ids,
        accepted=None if passes is None else tuple(accepted for accepted, _ in passes),
        drafted=None if passes is None else tuple(drafted for _, drafted in passes),
        finish_reason=answer.finish_reason,
        ttft_s=arrivals[0],
        duration_s=round(answer.duration_s, 6),
        arrivals_s=arrivals,
    )
    text = template.decode(answer.token_ids)
    hashed = sent_sha256(prompt, sent.ids)
    record = Record.of(prompt.id, len(sent.ids), completion, text, sent.started_at, prompt.turn, hashed)
    check(record, arm)
    return record


def _conversations(workload: TokenizedWorkload) -> Iterator[range]:
    """Yield the positions of each conversation's turns, as workers take them."""
    firsts = [place for place, prompt in enumerate(workload.workload.prompts) if prompt.turn == 1]
    for begin, end in zip(firsts, [*firsts[1:], len(workload.token_ids)], strict=True):
        yield range(begin, end)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keep what is there already from being looked through for garbage: with torch loaded, 0.2 s in which all wait."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def _together(work: Any) -> None:
    """Run coroutines at once; of several failures, one that says that the server is lost is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in work:
                group.create_task(coroutine)
    except BaseExceptionGroup as failures:
        lost = [e for e in failures.exceptions if isinstance(e, ServerError) and e.lost]
        raise (lost or failures.exceptions)[0] from None
