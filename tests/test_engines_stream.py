"""Answers kept while they stream and read later: the same as read at once, however networks cut them."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import fake_vllm
import pytest

from mxq.engines.answers import Answer, Received
from mxq.engines.base import Sampling
from mxq.engines.client import Client, Endpoint, Timeouts, connected
from mxq.engines.process import ServerError
from mxq.engines.stream import Kept

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [f"data: {event}\n\n".encode() for event in [*map(json.dumps, fake_vllm.events(chat=False)), "[DONE]"]]
TIMES = Timeouts(connect_s=1, silence_s=0.5, answer_s=2.0)


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


CHUNKS = [chunk(event) for event in EVENTS]
END = b"0\r\n\r\n"
CLOSE = b""


class Pieces:
    """A server that sends one answer after the other in given pieces, on as many connections as it takes."""

    def __init__(self, answers: Sequence[Sequence[bytes]]) -> None:
        self.answers, self.connections = iter(answers), 0

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        serving: set[asyncio.Task[None]] = set()

        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            serving.add(asyncio.create_task(self._serve(reader, writer)))

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            async with connected(Endpoint(url, "m"), TIMES) as client:
                yield client
        finally:
            server.close()
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)
            await asyncio.sleep(0)  # for what closes connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                for piece in next(self.answers):
                    if piece == CLOSE:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.002)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def receive(client: Client) -> Received:
    return await client.receive("x", max_tokens=13, sampling=Sampling())


def received(*answers: Sequence[bytes]) -> tuple[list[Received], int]:
    async def run() -> tuple[list[Received], int]:
        pieces = Pieces(answers)
        async with pieces.client() as client:
            return [await receive(client) for _ in answers], pieces.connections

    return asyncio.run(run())


def test_what_is_kept_is_read_later_and_its_connection_is_used_again() -> None:
    (first, second), connections = received([HEAD, *CHUNKS, END], [HEAD, *CHUNKS[:-1], CHUNKS[-1] + END])
    assert connections == 1
    for one in (first, second):
        assert one.unread == sum(map(len, [*CHUNKS, END]))
        assert one.tokens == 0
        answer = one.answer()
        assert one.unread == 0
        assert answer.token_ids == tuple(fake_vllm.TOKENS)
        assert len(set(answer.arrivals_s)) == len(answer.arrivals_s)  # each piece has its own time
        assert answer.arrivals_s == tuple(sorted(answer.arrivals_s))
        assert answer.arrivals_s[-1] < answer.duration_s
        assert min(answer.gaps_s) > 0.001


def test_an_answer_cut_anywhere_is_the_same_answer() -> None:
    """Networks cut where they like: into heads, sizes, events, ends; chunks hold half an event or all."""
    rng, events = random.Random(0), b"".join(EVENTS)
    answers: list[list[bytes]] = []
    for number in range(40):
        sizes = sorted(rng.sample(range(1, len(events)), number % 4))
        framed = [chunk(events[a:b]) for a, b in zip([0, *sizes], [*sizes, len(events)], strict=True)]
        whole = HEAD + b"".join(CHUNKS if number % 2 else framed) + END
        cuts = sorted(rng.sample(range(1, len(whole)), rng.randint(0, 12)))
        cuts += [len(whole) - rng.randint(1, 6)] if number % 3 == 0 else []
        cuts = sorted({*cuts, len(whole)})
        answers.append([whole[a:b] for a, b in zip([0, *cuts], cuts, strict=False)])
    found, connections = received(*answers)
    assert connections == 1
    assert 0 < sum(one.unread > 0 for one in found) < len(found)
    for one in found:
        assert one.answer().token_ids == tuple(fake_vllm.TOKENS)


def failing(*pieces: bytes) -> tuple[ServerError, bool]:
    """Return the error, and whether it came only when the answer was read."""

    async def run() -> Answer:
        async with Pieces([pieces]).client() as client:
            kept.append(await receive(client))
            return kept[0].answer()

    kept: list[Received] = []
    with pytest.raises(ServerError) as caught:
        asyncio.run(run())
    return caught.value, bool(kept)


def test_an_error_in_a_stream_is_seen_before_it_is_read() -> None:
    gave_up = chunk(b'data: {"error": {"message": "busy", "code": 429}}\n\n')
    error, late = failing(HEAD, *CHUNKS[:2], gave_up, CHUNKS[-1], END)
    assert (error.status, late) == (429, False)
    assert "gave up an answer: busy" in error.message


def test_chunks_of_another_length_than_they_say_are_no_answer() -> None:
    wrong = CHUNKS[1].replace(b"\r\n", b"0\r\n", 1)
    assert "not as long as it says" in failing(HEAD, CHUNKS[0], wrong, *CHUNKS[2:], END)[0].message
    fitting = []
    for size in range(1, 400):  # wherever it points to
        body = [CHUNKS[0], f"{size:x}\r\n".encode() + CHUNKS[1].partition(b"\r\n")[2], *CHUNKS[2:], END]
        fitting += [size] if Kept(b"", body, [0.0] * len(body), 0).whole else []
    # A chunk may hold the next ones, frames and all: lines that are no events.
    assert fitting == [sum(map(len, CHUNKS[1 : 2 + more])) - 6 for more in range(4)]


def test_sizes_with_leading_zeros_are_sizes() -> None:
    (one,), _ = received([HEAD, *[b"000" + chunk for chunk in CHUNKS], END])
    assert one.unread > 0
    assert one.answer().token_ids == tuple(fake_vllm.TOKENS)


def test_what_is_long_for_its_tokens_is_read_as_it_comes() -> None:
    padded = [chunk(b": " + b"x" * 8000 + b"\n\n" + event) for event in EVENTS]
    (one,), _ = received([HEAD, *padded, END])
    assert one.unread == 0
    assert one.answer().token_ids == tuple(fake_vllm.TOKENS)


def test_a_lost_connection_says_how_far_it_came() -> None:
    error, late = failing(HEAD, *CHUNKS[:4], b"zz\r\n")
    assert (error.lost, late) == (True, False)
    assert "tokens of an answer" in error.message


def test_a_used_connection_that_closes_before_any_answer_is_told_from_others() -> None:
    """Of the others, an answer may have been under way."""
    whole, head = [HEAD, *CHUNKS, END], HEAD[:20]

    async def run(*answers: Sequence[bytes]) -> list[bool]:
        found: list[bool] = []
        async with Pieces([*answers]).client() as client:
            for _ in answers:
                try:
                    await receive(client)
                except ServerError as error:
                    found.append(error.lost and error.unanswered)
        return found

    assert asyncio.run(run(whole, [CLOSE])) == [True]
    assert asyncio.run(run(whole, [CLOSE], [CLOSE])) == [True, False]  # the second comes on a new connection
    assert asyncio.run(run([CLOSE])) == [False]
    assert asyncio.run(run(whole, [head, CLOSE])) == [False]
    assert asyncio.run(run(whole, [HEAD, CLOSE])) == [False]
