"""Requests to a vLLM server: what an answer is made of, and each way to fail as one line."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import fake_vllm
import pytest
from test_engines_server import MODEL, command

from mxq.engines.answers import Acceptance, Answer, Assembly, Events
from mxq.engines.base import Sampling
from mxq.engines.client import Client, Endpoint, Timeouts, connected
from mxq.engines.metrics import Counters, difference, parse, when_idle
from mxq.engines.process import ServerError
from mxq.engines.server import serving

T = TypeVar("T")
GREEDY = Sampling()
TOKENS = tuple(fake_vllm.TOKENS)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """The stand-in, speculating, with each pass in its answers."""
    with serving(command(), MODEL, tmp_path_factory.mktemp("server") / "log", ready_s=20) as found:
        yield found


def using(endpoint: Endpoint, work: Callable[[Client], Awaitable[T]], timeouts: Timeouts | None = None) -> T:
    async def run() -> T:
        async with connected(endpoint, timeouts) as client:
            return await work(client)

    return asyncio.run(run())


async def ask(client: Client, prompt: Any = "well") -> Answer:
    return await client.complete(prompt, max_tokens=13, sampling=GREEDY)


def failure(endpoint: Endpoint, prompt: Any, timeouts: Timeouts | None = None) -> ServerError:
    with pytest.raises(ServerError) as caught:
        using(endpoint, lambda client: ask(client, prompt), timeouts)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("prompt", ["well", [1, 2, 3], [{"role": "user", "content": "well"}]], ids=str)
def test_an_answer_is_what_was_sent_and_when(endpoint: Endpoint, prompt: Any) -> None:
    begin = time.perf_counter()
    answer = using(endpoint, lambda client: ask(client, prompt))
    around = time.perf_counter() - begin
    assert answer.token_ids == TOKENS
    assert answer.text == "".join(f" {token}" for token in TOKENS)
    assert (answer.output_tokens, answer.prompt_tokens, answer.finish_reason) == (13, 5, "length")
    assert len(answer.arrivals_s) == len(fake_vllm.SPLIT)
    assert 0 < answer.ttft_s < answer.arrivals_s[-1] <= answer.duration_s < around
    assert len(answer.gaps_s) == 4
    assert sum(answer.gaps_s) == pytest.approx(answer.arrivals_s[-1] - answer.ttft_s)
    assert sum(answer.gaps_s) > 0.01  # the stand-in waits 5 ms between pieces
    assert answer.per_token_s == pytest.approx(sum(answer.gaps_s) / 12)
    assert answer.passes() == tuple(fake_vllm.PASSES)
    assert answer.acceptance is not None
    assert (answer.acceptance.passes, answer.acceptance.accepted, answer.acceptance.drafted) == (4, 8, 12)


def test_many_at_once_are_as_one_and_the_server_counts_them(endpoint: Endpoint) -> None:
    async def work(client: Client) -> tuple[list[Answer], Counters]:
        before = await when_idle(client.counters)
        answers = await asyncio.gather(*(ask(client) for _ in range(32)))
        return answers, difference(before, await when_idle(client.counters))

    answers, counted = using(endpoint, work)
    assert {answer.token_ids for answer in answers} == {TOKENS}
    assert counted == Counters(32, 32 * 13, 0, 32 * 4, 32 * 12, 32 * 8, (32 * 3, 32 * 3, 32 * 2))
    assert counted.acceptance_length == 3
    said = [answer.acceptance for answer in answers]
    assert counted.accepted == sum(one.accepted for one in said if one is not None)


@pytest.mark.parametrize(
    ("prompt", "reason", "lost"),
    [
        ("500", " answers 500: as it was asked", False),
        ("429", "answers 429: as it was asked; it has too much to do", False),
        ("broken", "the server sends broken JSON: {", False),
        ("cut", "broke off, after 6 tokens of an answer", True),
        ("unfinished", "the stream was cut", True),
        ("gives up", "the server gave up an answer: EngineCore encountered an issue.", False),
        ("miscounted", "the server sent 13 tokens and counted 14", False),
        ("uncounted", "does not count the tokens of an answer", False),
        ("contradicting", "counts of a request's verify passes contradict each other", False),
        ("endless", "sends more than the 13 tokens it was asked for", False),
        ("stalls", "says nothing for 0.3 s, after 9 tokens of an answer", True),
        ("silent", "says nothing for 0.3 s", True),
    ],
)
def test_what_fails_is_a_line(
    endpoint: Endpoint, prompt: str, reason: str, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mxq.engines.client._LOOK_S", 0.01)
    error = failure(endpoint, prompt, Timeouts(silence_s=0.3))
    assert reason in str(error)
    assert error.lost == lost
    assert error.exit_code == 1


def test_an_answer_that_does_not_end_is_given_up(endpoint: Endpoint) -> None:
    error = failure(endpoint, "stalls", Timeouts(answer_s=0.3))
    assert "has not finished an answer after 0.3 s, after 9 tokens" in error.message
    assert error.lost


def test_what_is_answered_at_once_is_an_object_or_a_line(endpoint: Endpoint) -> None:
    request = {"model": endpoint.model, "prompt": [1], "stream": False}
    assert using(endpoint, lambda client: client.post_json("/v1/completions", request))["choices"]
    for wrong, reason in [(request | {"model": "x"}, "answers 404"), (request | {"prompt": "odd"}, "no JSON object")]:
        with pytest.raises(ServerError, match=reason):
            using(endpoint, lambda client, wrong=wrong: client.post_json("/v1/completions", wrong))  # type: ignore[misc]


def test_another_model_is_a_line(endpoint: Endpoint) -> None:
    other = Endpoint(endpoint.base_url, "other")
    assert "answers 404: The model `other` does not exist." in failure(other, "well").message


def test_a_server_that_dies_is_told_from_one_that_refuses(tmp_path: Path) -> None:
    with serving(command(), MODEL, tmp_path / "log", ready_s=20) as endpoint:
        engine = failure(endpoint, "engine dies")
        assert engine.lost
        assert "EngineCore encountered an issue, and is not healthy any more" in engine.message
        assert "its log says: ValueError: planted in the engine" in engine.message
        assert failure(dataclasses.replace(endpoint, process=None), "500").lost
    with serving(command(), MODEL, tmp_path / "second", ready_s=20) as endpoint:
        error = failure(endpoint, "dies")
        assert error.lost
        assert "the server ended (SIGKILL" in error.message
        assert "its log says: ValueError: planted" in error.message
        assert "the server ended (SIGKILL" in failure(endpoint, "well").message


def test_counters_that_are_reset_or_missing_are_a_line(endpoint: Endpoint, tmp_path: Path) -> None:
    async def reset(client: Client) -> Counters:
        before = await client.counters()
        await ask(client, "reset")
        return difference(before, await client.counters())

    using(endpoint, ask)
    with pytest.raises(ServerError, match="counts less than before; the server was restarted"):
        using(endpoint, reset)
    plain = command("uncounting", method="ar")
    with serving(plain, MODEL, tmp_path / "log", ready_s=20) as other:
        with pytest.raises(ServerError, match="/metrics answers 404"):
            using(other, lambda client: client.counters())
        answer = using(other, ask)
    assert answer.token_ids == TOKENS
    assert answer.acceptance is None
    assert answer.passes() is None


def test_a_server_that_others_use_is_never_idle() -> None:
    async def busy() -> Counters:
        return Counters(0, 0, 2)

    with pytest.raises(ServerError, match="not idle: 2 requests"):
        asyncio.run(when_idle(busy, timeout_s=0))


SAMPLE = 'vllm:num_requests_running{engine="%d",model_name="m"} %s\n'
COUNTED = "".join(
    f'{name}{{engine="{engine}",model_name="{model}"}} {value}\n'
    for engine, model, value in [(0, "m", 1.0), (1, "m", 2.0), (0, "other", 100.0)]
    for name in ("vllm:num_requests_waiting", "vllm:generation_tokens_total", "vllm:request_success_total")
)


def test_counts_are_of_one_model_over_its_engines() -> None:
    text = COUNTED + SAMPLE % (0, "4.0")
    assert parse(text, "m") == Counters(requests=3, output_tokens=3, busy=7)
    for broken, reason in [
        (text + "{{{\n", "not in Prometheus' text format"),
        (COUNTED + SAMPLE % (0, "NaN"), "not in Prometheus' text format"),
        (COUNTED + SAMPLE % (0, "-1"), "not in Prometheus' text format"),
        (COUNTED, "no vllm:num_requests_running of m"),
        (text + 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 1\n', "some positions only"),
        (text + 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="x"} 1\n', "not in Prometheus'"),
        (text + "vllm:spec_decode_num_accepted_tokens_per_pos_total 1\n", "not in Prometheus'"),
    ]:
        with pytest.raises(ServerError, match=reason):
            parse(broken, "m")


@pytest.mark.parametrize(
    ("tokens", "reason", "last"),
    [
        (9, "stop", (3, 3)),  # the end of text is the pass's own token
        (8, "stop", (3, 3)),  # it was the third draft: nothing accepted lies behind it
        (7, "stop", (2, 3)),
        (6, "stop", (1, 3)),
        (7, "length", (3, 3)),  # a limit cuts the answer, not the pass
    ],
)
def test_drafts_behind_an_end_of_text_do_not_count(tokens: int, reason: str, last: tuple[int, int]) -> None:
    said = Acceptance((1, 0, 1, 1), 9, ((0, 3), (2, 3), (3, 3)))  # 1 + 1 + 3 + 4 = 9 tokens
    answer = Answer("", None, tokens, 1, reason, (0.1,), 0.2, said)
    passes = answer.passes()
    assert passes is not None
    assert passes[:2] == ((0, 3), (2, 3))
    assert passes[2] == last


def test_hostile_events_are_a_line() -> None:
    """Every event with one value replaced, each piece of a stream cut at each byte: an answer, or a ServerError."""
    fake_vllm.DETAILED = fake_vllm.SPECULATIVE = True
    events = fake_vllm.events(chat=False)
    text = (
        b"".join(f"data: {json.dumps(event)}\r\n\r\n".encode() for event in events) + b": a comment\n\ndata: [DONE]\n\n"
    )
    for cut in range(0, len(text), 7):
        stream, assembly = Events(), Assembly(13)
        for piece in (text[:cut], text[cut:]):
            for event in stream.feed(piece):
                assembly.add(event, 0.0)
        stream.end()
        assert assembly.answer(0.0).token_ids == TOKENS
    odd: list[Any] = [
        None,
        -1,
        1e400,
        True,
        "",
        "x" * 1000,
        [],
        [1],
        {},
        {"message": "\n"},
        [[]],
        [-1],
        [True],
        "\x1b[31m",
    ]
    refused = 0
    for number in range(len(events)):
        for path in _paths(events[number]):
            for value in odd:
                changed = json.loads(json.dumps(events[number]))
                holder = changed
                for key in path[:-1]:
                    holder = holder[key]
                holder[path[-1]] = value
                assembly = Assembly(13)
                try:
                    for event in [*events[:number], changed, *events[number + 1 :]]:
                        assembly.add(event, 0.0)
                    assembly.answer(0.0)
                except ServerError as error:
                    refused += 1
                    assert str(error).isprintable()  # noqa: PT017
    assert refused > 500


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _paths(inner, (*path, key))
