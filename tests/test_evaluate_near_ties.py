"""How near a tie it was: what a server says of two tokens, believed only where it can be."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from scripted import small_plan
from served import served

from mxq.engines.client import Endpoint
from mxq.engines.process import ServerError
from mxq.evaluate.near_ties import Difference, NearTie, _near_tie, differences, reference

AT = Difference("p", 1, 4, (1, 2, 3), (7, 9))


class Saying:
    """A client whose server says one thing."""

    endpoint = Endpoint("http://x", "m")

    def __init__(self, said: Any) -> None:
        self.said = said
        self.asked: dict[str, Any] = {}

    async def post_json(self, path: str, request: dict[str, Any]) -> Any:
        self.asked = request
        return self.said


def answer(top: Any) -> dict[str, Any]:
    return {"choices": [{"logprobs": {"top_logprobs": [top]}}]}


def ask(said: Any) -> NearTie:
    return asyncio.run(_near_tie(Saying(said), AT))  # type: ignore[arg-type]


def test_the_gap_is_from_the_likeliest_token_to_the_worse_of_the_two() -> None:
    client = Saying(answer({"token_id:7": -0.7, "token_id:9": -0.75, "token_id:1": -5.0}))
    assert asyncio.run(_near_tie(client, AT)) == NearTie("p", 1, 4, 0.05, both_on_top=True)  # type: ignore[arg-type]
    assert (client.asked["prompt"], client.asked["max_tokens"]) == ([1, 2, 3], 1)
    third = ask(answer({"token_id:1": -0.1, "token_id:7": -3.0, "token_id:9": -4.0}))
    assert (third.gap, third.both_on_top) == (3.9, False)
    # One that is none of the likeliest is at least as far away as the last of them.
    none = ask(answer({"token_id:7": -0.1, "token_id:1": -3.0}))
    assert (none.gap, none.both_on_top) == (2.9, False)


@pytest.mark.parametrize(
    "said",
    [
        *({}, {"choices": []}, {"choices": [1]}, {"choices": [{"logprobs": None}]}, answer(None), answer([])),
        *(answer({}), answer({"token_id:7": -0.1}), answer({"seven": -0.1, "nine": -0.2})),
        *(answer({"token_id:7": value, "token_id:9": -1.0}) for value in (None, "x", float("nan"), 5.0, -1e300)),
    ],
    ids=repr,
)
def test_what_says_nothing_is_a_line(said: Any) -> None:
    with pytest.raises(ServerError, match="does not say how likely tokens are"):
        ask(said)


def test_differences_are_where_answers_part() -> None:
    plan = small_plan(prompts=6, names=["p"])
    (workload,), records = plan.workloads, served(0, prompts=6).records
    changed = [replace(record, token_ids=(*record.token_ids[:3], 0, *record.token_ids[4:])) for record in records[:2]]
    shorter = replace(records[2], token_ids=records[2].token_ids[:5])
    otherwise = replace(records[3], prompt_sha256="x", token_ids=(0,))  # asked something else: nothing to compare
    mine = [*changed, shorter, otherwise, *records[4:]]
    template: Any = SimpleNamespace(encode=None)  # there are no later turns
    found = list(differences(workload, mine, records, template))
    assert [(one.prompt_id, one.position) for one in found] == [("p-0", 3), ("p-1", 3)]
    ids = workload.token_ids[0]
    assert ids is not None
    assert found[0].ids == (*ids, *records[0].token_ids[:3])
    assert found[0].tokens == (0, records[0].token_ids[3])


def test_what_is_compared_with_what() -> None:
    plan = replace(small_plan(), concurrencies=(1, 4))
    plain, spec = plan.arms[0], plan.arms[1]
    workload = plan.workloads[0]
    assert reference(plan, plan.cell(plain, workload)) is None
    assert reference(plan, plan.cell(spec, workload, 4)) == (plain, "sums", 1, 0)
    assert reference(replace(plan, concurrencies=(4,)), plan.cell(spec, workload, 4, 1)) == (plain, "sums", 4, 1)
    assert reference(replace(plan, arms=(spec,)), plan.cell(spec, workload)) is None
    sampled = replace(plan.settings, sampling=replace(plan.settings.sampling, temperature=1.0))
    assert reference(replace(plan, settings=sampled), plan.cell(spec, workload)) is None
