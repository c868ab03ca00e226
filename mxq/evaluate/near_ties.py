"""How near a tie it was where a speculative greedy answer parts from the plain one: asked of a server of the target.

Greedy speculation changes no token, but passes of another length round otherwise, and two tokens that are nearly equal
may then change places. At the first position that differs, the server is given the prompt and what both answers have in
common, and says how likely the two tokens are. Where both are on top and close to each other, rounding explains the
difference; anything else is a defect to look for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mxq.engines.client import Client, Endpoint, Timeouts, connected
from mxq.engines.process import ServerError
from mxq.evaluate.matrix import Arm, Cell, Place, Plan, TokenizedWorkload
from mxq.evaluate.records import Record
from mxq.evaluate.runner import prompt_ids
from mxq.workloads import ChatTemplate

_ASKED = 5
_TOKEN = "token_id:"


@dataclass(frozen=True)
class NearTie:
    """One difference: at which token of which answer, and how likely the two tokens are there.

    ``gap``: by how much the less likely of the two is below the likeliest token, in natural logarithms; at least that
    much where it is none of the five likeliest.
    """

    prompt_id: str
    turn: int
    position: int
    gap: float
    both_on_top: bool


@dataclass(frozen=True)
class Difference:
    """Where two answers to the same prompt part: the tokens of either there, behind ``ids``."""

    prompt_id: str
    turn: int
    position: int
    ids: tuple[int, ...]
    tokens: tuple[int, int]


def reference(plan: Plan, cell: Cell) -> Place | None:
    """Return the plain cell that a cell is compared with; None if it is not to be compared with any.

    One request at a time is the reference, whatever the concurrency; the same concurrency where that was not measured.
    """
    if cell.arm.method == "ar" or not plan.settings.sampling.greedy:
        return None
    concurrency = 1 if 1 in plan.concurrencies else cell.concurrency
    place = (Arm(cell.arm.target, "ar"), cell.workload, concurrency, cell.repeat)
    return place if place[0] in plan.arms else None


def differences(
    workload: TokenizedWorkload, mine: Sequence[Record], plain: Sequence[Record], template: ChatTemplate
) -> Iterator[Difference]:
    """Yield where answers part from the plain ones; later turns only where both arms were asked the same."""
    texts = [record.text for record in mine]
    for position, (record, other) in enumerate(zip(mine, plain, strict=True)):
        first, second = record.token_ids, other.token_ids
        if record.prompt_sha256 != other.prompt_sha256 or first == second:
            continue
        at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
        if at is None:  # one is the other's beginning: no tie explains that, so it is left without an explanation
            continue
        ids = (*prompt_ids(workload, position, texts, template.encode), *first[:at])
        yield Difference(record.prompt_id, record.turn, at, ids, (first[at], second[at]))


async def near_ties(endpoint: Endpoint, found: Sequence[Difference]) -> list[NearTie]:
    """Ask a server about every difference; raises ServerError where it does not say."""
    async with connected(endpoint, Timeouts(answer_s=300.0)) as client:
        return [await _near_tie(client, one) for one in found]


async def _near_tie(client: Client, at: Difference) -> NearTie:
    said = await client.post_json(
        "/v1/completions",
        {
            "model": client.endpoint.model,
            "prompt": list(at.ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": _ASKED,
            "return_tokens_as_token_ids": True,
        },
    )
    likely = _likely(said)
    best, least = max(likely.values()), min(likely.values())
    gap = best - min(likely.get(token, least) for token in at.tokens)
    top = sorted(likely, key=lambda token: -likely[token])[:2]
    return NearTie(at.prompt_id, at.turn, at.position, round(gap, 6), set(top) == set(at.tokens))


def _likely(said: Mapping[str, Any]) -> dict[int, float]:
    """Return the likeliest tokens with the logarithms of their probabilities; raises ServerError."""
    try:
        (found,) = said["choices"][0]["logprobs"]["top_logprobs"]
        likely = {int(name.removeprefix(_TOKEN)): float(value) for name, value in found.items()}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        likely = {}
    if len(likely) < 2 or not all(-1e9 < value <= 1e-3 for value in likely.values()):
        raise ServerError("the server does not say how likely tokens are (logprobs)")
    return likely
