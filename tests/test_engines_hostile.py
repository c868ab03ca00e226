"""Servers that speak HTTP badly, or mean harm: a request ends in time with a line, and what is no answer is none.

The server is a script of bytes in the client's own loop; what vLLM itself does is in fake_vllm.
"""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import fake_vllm
import pytest

from mxq.engines.answers import Answer, Assembly, Events
from mxq.engines.base import Sampling
from mxq.engines.client import Endpoint, Timeouts, connected, root_of
from mxq.engines.process import ServerError
from mxq.engines.server import attached
from mxq.errors import UsageError

Reply = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
TIMES = Timeouts(connect_s=1, silence_s=0.5, answer_s=1.0)


def stream(*, end: bool = True) -> bytes:
    """A whole answer of 13 tokens, as vLLM streams it."""
    events = [json.dumps(event) for event in fake_vllm.events(chat=False)]
    return b"".join(f"data: {event}\n\n".encode() for event in [*events, *(["[DONE]"] if end else [])])


def whole(body: bytes, head: bytes = OK) -> bytes:
    return head + f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


class Script:
    """A server that answers every request alike, and keeps what it was sent."""

    def __init__(self, reply: Reply, health: bytes = whole(b"")) -> None:
        self.reply, self.health = reply, health
        self.requests: list[bytes] = []
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        serving: set[asyncio.Task[None]] = set()

        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            serving.add(asyncio.create_task(self._serve(reader, writer)))

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.close()
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)
            await asyncio.sleep(0)  # for what closes connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head)
            if head.startswith(b"GET /health"):
                writer.write(self.health)
            elif isinstance(self.reply, bytes):
                writer.write(self.reply)
            else:
                await self.reply(writer)
            await writer.drain()
            writer.close()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            if not writer.is_closing():
                writer.transport.abort()


def ask(script: Script, *, times: Timeouts = TIMES, key: str | None = None) -> Answer:
    async def run() -> Answer:
        async with script.listening(), connected(Endpoint(script.url, "m", key=key), times) as client:
            return await client.complete("x", max_tokens=13, sampling=Sampling())

    return asyncio.run(run())


def failure(reply: "Reply | Script", **how: Any) -> ServerError:
    with pytest.raises(ServerError) as caught:
        ask(reply if isinstance(reply, Script) else Script(reply), **how)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    return caught.value


async def endless(writer: asyncio.StreamWriter, begin: bytes, piece: bytes, pause_s: float = 0.0) -> None:
    writer.write(begin)
    while not writer.is_closing():
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(pause_s)


def for_ever(begin: bytes, piece: bytes, pause_s: float = 0.0) -> Reply:
    return lambda writer: endless(writer, begin, piece, pause_s)


CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":" x"}]}\n\n'


@pytest.mark.parametrize(
    "reply",
    [
        whole(stream()),
        OK.replace(b"1.1", b"1.0") + b"\r\n" + stream(),  # the end of the connection is that of the body
        OK + b"connection: close\r\n\r\n" + stream(),
        whole(b"\xef\xbb\xbf: a comment\r\n\r\nevent: x\r\nid: 7\r\n" + stream().replace(b"\n", b"\r\n")),
    ],
    ids=["length", "HTTP/1.0", "close", "other fields"],
)
def test_every_way_to_frame_a_body_is_read(reply: bytes) -> None:
    assert ask(Script(reply)).token_ids == tuple(fake_vllm.TOKENS)


@pytest.mark.parametrize(
    ("reply", "reason", "lost"),
    [
        (whole(b""), "the stream was cut", True),
        (whole(stream()[:-20]), "the stream was cut", True),
        (whole(stream(end=False)), "the stream was cut", True),
        (OK.replace(b"1.1", b"1.0") + b"\r\n" + stream()[:300], "the stream was cut in the middle", True),
        (OK + b"content-length: 99999\r\n\r\n" + stream(), "broke off, after 13 tokens", True),
        (CHUNKED + b"zz\r\n", "broke off", True),
        (b"", "broke off", True),
        (b"\x16\x03\x01 what is this\r\n\r\n", "broke off", True),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 5000 + b"\r\n", "broke off", True),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n", "broke off", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "answers 204", False),
        (whole(json.dumps({"text": "all at once"}).encode()), "the stream was cut", True),
        (whole(b"data: " + b"[" * 100_000 + b"\n\n"), "broken JSON", False),
        (whole(b'data: {"choices": [{"text": "\xff"}]}\n\n'), "broken JSON", False),
    ],
    ids=lambda value: value[:30].decode("latin-1") if isinstance(value, bytes) else "",
)
def test_what_is_no_answer_is_a_line(reply: bytes, reason: str, lost: bool) -> None:
    error = failure(reply)
    assert reason in str(error)
    assert error.lost == lost


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (for_ever(OK, b"x: y\r\n", 0.2), "has not finished an answer after 1 s"),
        (for_ever(CHUNKED, b"1\r\n:\r\n", 0.02), "has not finished an answer after 1 s"),
        (for_ever(OK + b"\r\n", b": still here\n\n", 0.02), "has not finished an answer after 1 s"),
        (for_ever(OK + b"\r\n", b'data: {"choices":[]}\n\n'), "has not finished an answer after 1 s"),
        (for_ever(OK + b"\r\n", TOKEN), "sends more than the 13 tokens"),
        (for_ever(CHUNKED + b"ffffffff\r\n", b"x" * 65536), "a line of more than"),
        (for_ever(b"HTTP/1.1 500 X\r\n\r\n", b"x" * 65536), "answers more than 32 MiB"),
    ],
    ids=["headers", "trickle", "comments", "nothing", "tokens", "line", "error"],
)
@pytest.mark.timeout(60)
def test_an_endless_answer_is_given_up_in_time(reply: Reply, reason: str) -> None:
    long = Timeouts(connect_s=1, silence_s=0.5, answer_s=600)
    assert reason in str(failure(reply, times=TIMES if "1 s" in reason else long))


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
def test_a_compressed_answer_is_not_unpacked(coding: str) -> None:
    bomb = gzip.compress(b"data: {}\n\n" * 1_000_000)
    assert f"packed as {coding}" in str(failure(whole(bomb, OK + f"content-encoding: {coding}\r\n".encode())))


@pytest.mark.timeout(60)
def test_a_line_that_comes_in_small_pieces_costs_no_more_than_its_length() -> None:
    """What came before is not looked at again with each piece: 16 MiB in pieces of 64 bytes would take hours."""
    events, piece = Events(), b"x" * 64
    for _ in range((1 << 24) // len(piece)):
        assert not list(events.feed(piece))
    with pytest.raises(ServerError, match="a line of more than 16 MiB"):
        list(events.feed(piece))


def test_tokens_without_ids_are_held_against_the_limit_too() -> None:
    assembly = Assembly(2)
    for _ in range(2):
        assembly.add({"choices": [{"text": "x"}]}, 0.0)
    with pytest.raises(ServerError, match="more than the 2 tokens"):
        assembly.add({"choices": [{"text": "x"}]}, 0.0)


@pytest.mark.parametrize(
    ("status", "head", "reason"),
    [
        (429, b"retry-after: 1\r\n", "answers 429: busy; it has too much to do"),
        (503, b"retry-after: 1\r\n", "answers 503: busy"),
        (502, b"", "answers 502: busy"),
        (413, b"", "answers 413: busy"),
    ],
)
def test_a_refused_request_is_not_sent_again(status: int, head: bytes, reason: str) -> None:
    """It would be answered later than it was asked: what is measured would be another load than the one asked for."""
    script = Script(whole(b'{"error": {"message": "busy"}}', f"HTTP/1.1 {status} X\r\n".encode() + head))
    error = failure(script)
    assert reason in str(error)
    assert (error.status, error.lost) == (status, False)
    assert sum(b"POST" in request for request in script.requests) == 1


def test_a_refusal_by_a_server_that_is_not_healthy_is_its_loss() -> None:
    error = failure(Script(whole(b"", b"HTTP/1.1 503 X\r\n"), health=whole(b"", b"HTTP/1.1 503 X\r\n")))
    assert error.lost
    assert "is not healthy any more" in str(error)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_nothing_follows_a_redirect(status: int) -> None:
    """Least of all the key."""
    elsewhere = Script(whole(stream()))

    async def run() -> None:
        async with elsewhere.listening():
            moved = f"HTTP/1.1 {status} X\r\nlocation: {elsewhere.url}/v1/completions\r\n".encode()
            script = Script(whole(b"", moved), health=whole(b"", moved))
            async with script.listening(), connected(Endpoint(script.url, "m", key="secret"), TIMES) as client:
                assert not await client.healthy()
                with pytest.raises(ServerError, match=f"answers {status}"):
                    await client.complete("x", max_tokens=13, sampling=Sampling())
                with pytest.raises(ServerError, match=f"answers {status}"):
                    await client.counters()

    asyncio.run(run())
    assert elsewhere.requests == []


def test_a_proxy_is_for_servers_elsewhere_and_no_password_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request to this machine goes there; to another one through the proxy, with the key and nothing else."""
    netrc = tmp_path / "netrc"
    netrc.write_text("default login me password mine\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    proxy, script = Script(whole(stream())), Script(whole(stream()))

    async def run() -> None:
        async with proxy.listening(), script.listening():
            for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
                monkeypatch.setenv(name, proxy.url)
            for url in (script.url, script.url.replace("127.0.0.1", "localhost"), "http://gpu.example:8000"):
                async with connected(Endpoint(url, "m", key="secret"), TIMES) as client:
                    answer = await client.complete("x", max_tokens=13, sampling=Sampling())
                    assert answer.token_ids == tuple(fake_vllm.TOKENS)
            monkeypatch.setenv("no_proxy", "gpu.example")
            async with connected(Endpoint("http://gpu.example:8000", "m"), TIMES) as client:
                with pytest.raises(ServerError, match="nothing answers at"):
                    await client.complete("x", max_tokens=13, sampling=Sampling())

    asyncio.run(run())
    assert [request.split(b"\r\n")[0] for request in proxy.requests] == [
        b"POST http://gpu.example:8000/v1/completions HTTP/1.1"
    ]
    assert len(script.requests) == 2
    for request in (*proxy.requests, *script.requests):
        assert b"authorization: bearer secret" in request.lower()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://me:secret@127.0.0.1:8000", "the key of a server belongs into VLLM_API_KEY"),
        ("http://127.0.0.1:99999", "is no address"),
        ("http://127.0.0.1:x", "is no address"),
        ("http://", "is no address"),
        ("http://a..b", "is no address"),
        ("http://[::1", "is no address"),
        ("http://127.0.0.1:8000/v1?x=1", "is no address"),
        ("http://127.0.0.1:8000/\n", "is no address"),
        ("ftp://127.0.0.1", "is no address"),
    ],
)
def test_an_address_that_is_none_is_wrong_usage(url: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        attached(url, "m")
    assert reason in str(caught.value)
    assert "secret" not in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"data": 7}',
        b'{"data": [7, {"id": 7}]}',
        b'{"data": {"id": "m"}}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"data": [{"id": "\x1b[31m\\n"}]}',
    ],
)
def test_a_server_that_serves_no_models_is_a_line(body: bytes) -> None:
    script = Script(whole(body))

    async def run() -> None:
        async with script.listening():
            await asyncio.to_thread(attached, script.url, "m")

    with pytest.raises((ServerError, UsageError)) as caught:
        asyncio.run(run())
    assert str(caught.value).isprintable()


def test_a_root_is_without_v1() -> None:
    assert root_of("https://gpu.example/vllm/v1/") == "https://gpu.example/vllm"
    assert root_of("http://[::1]:8000") == "http://[::1]:8000"
