"""Requests to a vLLM server: one at a time or many at once, in one process, streamed.

HTTP is aiohttp's, as in ``vllm bench serve``: its parser is compiled, and a piece of a stream costs less than half of
what it does with httpx, which huggingface_hub brings. A client that shares its processors with the server is part of
what it measures.
"""

import asyncio
import contextlib
import ipaddress
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mxq.engines.answers import Answer, Received, quoted_text
from mxq.engines.base import Sampling
from mxq.engines.metrics import Counters, caches_prefixes, parse
from mxq.engines.process import ServerError, ServerProcess
from mxq.engines.stream import Ears, listen
from mxq.errors import UsageError

if TYPE_CHECKING:
    import aiohttp

Messages = Sequence[dict[str, str]]
"""A chat, as ``[{"role": "user", "content": "..."}]``."""

_MOST_BODY = 1 << 25


@dataclass(frozen=True)
class Timeouts:
    """How long to wait for a connection, for the next piece of an answer, and for a whole answer, in seconds."""

    connect_s: float = 10.0
    silence_s: float = 300.0
    answer_s: float = 3600.0


@dataclass(frozen=True)
class Endpoint:
    """A server that answers.

    Attributes:
        base_url: without ``/v1``, as ``http://127.0.0.1:8000``.
        model: the name that it serves the model under.
        version: vLLM's; None if it does not say.
        root: what it was started with: a directory of its machine, or an id of the hub; None if it does not say.
        key: sent with every request.
        local: started here: no proxy is in between.
        process: of a server that was started here, which can be looked at.
    """

    base_url: str
    model: str
    version: str | None = None
    root: str | None = None
    key: str | None = None
    local: bool = False
    process: ServerProcess | None = None


def root_of(base_url: str) -> str:
    """Return a base URL without the ``/v1`` that clients of OpenAI's interface have at its end."""
    root = base_url.rstrip("/").removesuffix("/v1")
    try:
        parts, secret = urlsplit(root), "@" in urlsplit(root).netloc
        known = parts.scheme in ("http", "https") and bool((parts.hostname or "").encode("idna")) and parts.port != 0
    except ValueError:
        known, secret = False, "@" in root
    if secret:
        raise UsageError("the address of a server has a password in it", f"the key of a server belongs into {KEY}")
    if not known or parts.query or parts.fragment or not root.isprintable() or " " in root:
        raise UsageError(f"{base_url!r} is no address of a server", "write it as http://HOST:PORT")
    return root


class Client:
    """Sends requests to an :class:`Endpoint`; see :func:`connected`."""

    def __init__(self, endpoint: Endpoint, http: "aiohttp.ClientSession", timeouts: Timeouts, ears: Ears) -> None:
        self.endpoint = endpoint
        self._http, self._timeouts, self._ears = http, timeouts, ears

    async def complete(self, prompt: Sequence[int] | str | Messages, **how: Any) -> Answer:
        """Send one request and return its answer, as :meth:`receive` has it."""
        return (await self.receive(prompt, **how)).answer()

    async def receive(
        self, prompt: Sequence[int] | str | Messages, *, max_tokens: int, sampling: Sampling, seed: int = 0, **more: Any
    ) -> Received:
        """Send one request and return its answer, which can be read later.

        Args:
            prompt: token ids or text to continue, or the messages of a chat, to which the server's template is applied.
            max_tokens: the most tokens to generate.
            sampling: how; what it does not say is neutral, whatever the model's generation_config.json has.
            seed: of this request.
            more: further fields of the request, such as ``chat_template_kwargs``.

        Raises:
            ServerError: there is no whole answer.
        """
        chat = not isinstance(prompt, str) and any(isinstance(part, dict) for part in prompt)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body = {
            "model": self.endpoint.model,
            "messages" if chat else "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": 1.0 if sampling.greedy else sampling.top_p,
            "top_k": 0 if sampling.greedy else sampling.top_k,
            **NEUTRAL,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **more,
        }
        received = Received(max_tokens, time.perf_counter())
        way = _Way()
        async with self._failing(received, way):
            async with self._http.post(
                f"{self.endpoint.base_url}{path}", json=body, allow_redirects=False, trace_request_ctx=way
            ) as response:
                way.answered = True
                if response.status != 200:
                    raise self._refused(response.status, await _body(response))
                _check_plain(response)
                kept = await listen(self._ears, response, max_tokens, self._timeouts.silence_s, received.take)
            received.end(time.perf_counter(), kept)
        return received

    async def counters(self) -> Counters:
        """Return what the server has counted; raises ServerError if it has no such counts."""
        return parse((await self._get("/metrics")).decode(errors="replace"), self.endpoint.model)

    async def caches_prefixes(self) -> bool | None:
        """Whether the server says that it caches prefixes; None if it says nothing of it."""
        return caches_prefixes((await self._get("/metrics")).decode(errors="replace"))

    async def healthy(self) -> bool:
        """Whether the server says that it is ready for requests; one that does not answer is not."""
        import aiohttp

        try:
            wait = aiohttp.ClientTimeout(total=_HEALTH_S)
            async with self._http.get(
                f"{self.endpoint.base_url}/health", timeout=wait, allow_redirects=False
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def get_json(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path; raises ServerError."""
        return self._object(path, await self._get(path))

    async def post_json(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request that is answered at once, and return the JSON object; raises ServerError."""
        async with (
            self._failing(),
            self._http.post(f"{self.endpoint.base_url}{path}", json=request, allow_redirects=False) as response,
        ):
            return self._object(path, await self._whole(response, path))
        raise AssertionError

    def _object(self, path: str, body: bytes) -> dict[str, Any]:
        try:
            made = json.loads(body)
        except (ValueError, RecursionError):
            made = None
        if not isinstance(made, dict):
            raise ServerError(f"{self.endpoint.base_url}{path} answers no JSON object", _IS_IT)
        return made

    async def _get(self, path: str) -> bytes:
        async with (
            self._failing(),
            self._http.get(f"{self.endpoint.base_url}{path}", allow_redirects=False) as response,
        ):
            return await self._whole(response, path)
        raise AssertionError

    async def _whole(self, response: "aiohttp.ClientResponse", path: str) -> bytes:
        body = await _body(response)
        if response.status != 200:
            raise self._refused(response.status, body, path)
        _check_plain(response)
        return body

    @asynccontextmanager
    async def _failing(self, received: Received | None = None, way: "_Way | None" = None) -> AsyncIterator[None]:
        """Say in a line what is wrong with the connection, or with the server behind it."""
        import aiohttp

        url, times = self.endpoint.base_url, self._timeouts
        try:
            async with asyncio.timeout(times.answer_s):
                yield
        except aiohttp.ServerTimeoutError as error:
            await self._look(1)
            connecting = isinstance(error, aiohttp.ConnectionTimeoutError)
            what = (
                f"takes no connection for {times.connect_s:g} s"
                if connecting
                else f"says nothing for {times.silence_s:g} s"
            )
            raise ServerError(f"{url} {what}{_after(received)}", lost=True) from None
        except TimeoutError:
            what = f"has not finished an answer after {times.answer_s:g} s"
            raise ServerError(f"{url} {what}{_after(received)}", lost=True) from None
        except aiohttp.InvalidURL:
            raise ServerError(f"{url} is no URL", _IS_IT) from None
        except aiohttp.ClientConnectorError as error:
            await self._look()
            raise ServerError(f"nothing answers at {url} ({quoted_text(str(error))})", _IS_IT, lost=True) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            unanswered = way is not None and way.closed_before(error)
            if not unanswered:
                await self._look()
            reason = quoted_text(str(error)) or type(error).__name__
            what = f"{url} broke off{_after(received)} ({reason})"
            raise ServerError(what, lost=True, unanswered=unanswered) from None
        except ServerError as error:
            if error.lost:
                await self._look()
            if (error.status or 0) >= 500 and not await self.healthy():
                await self._look()
                # Seen with vLLM 0.32: a server whose engine was killed stays, and answers every request by 500.
                process = self.endpoint.process
                message = f"{error.message.rstrip('.')}, and is not healthy any more"
                raise ServerError(message, lost=True) if process is None else process.failure(message) from None
            raise

    async def _look(self, looks: int = 10) -> None:
        """Raise the better error if the server is gone; a broken connection is seen a moment before its end."""
        if (process := self.endpoint.process) is None:
            return
        for _ in range(looks):
            process.check()
            await asyncio.sleep(_LOOK_S)

    def _refused(self, status: int, body: bytes, path: str = "") -> ServerError:
        said = _message(body)
        what = f"{self.endpoint.base_url}{path} answers {status}" + (f": {said}" if said else "")
        if status in (401, 403):
            return ServerError(what, f"put the key that it was started with into {KEY}", status=status)
        if status == 429:
            return ServerError(what, "it has too much to do: send fewer requests at once", status=status)
        return ServerError(what, status=status)


@dataclass
class _Way:
    """What became of a request: whether its connection had been ``used`` before, and an answer began."""

    used: bool = False
    answered: bool = False

    def closed_before(self, error: Exception) -> bool:
        """Whether an error is the end of a used connection, and no part of an answer has come."""
        import aiohttp

        begun = isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str)  # in its head
        gone = isinstance(error, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError))
        return self.used and not self.answered and gone and not begun


KEY = "VLLM_API_KEY"
"""The variable that has the key of a server, for vLLM itself and here: a command line can be read by others."""

NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_IS_IT = "is it the address of a vLLM server?"
_LOOK_S = 0.1
_HEALTH_S = 10.0
_IDLE_S = 2.0
"""vLLM closes connections that are idle for 5 s; one that it closes as a request is sent would fail that request."""


@asynccontextmanager
async def connected(endpoint: Endpoint, timeouts: Timeouts | None = None) -> AsyncIterator[Client]:
    """Open a client; any number of requests can be under way at once."""
    import aiohttp

    times = timeouts or Timeouts()
    if endpoint.key and not (endpoint.key.isascii() and endpoint.key.isprintable()):
        raise UsageError(f"the key for {endpoint.base_url} has signs that no header may have", "is it the key itself?")
    key = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_use)
    async with aiohttp.ClientSession(
        headers={"Accept-Encoding": "identity", **key},
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=times.connect_s, sock_read=times.silence_s),
        proxy=_proxy(endpoint),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trace_configs=[trace],
    ) as http:
        with contextlib.closing(Ears()) as ears:
            yield Client(endpoint, http, times, ears)


async def _note_use(session: "aiohttp.ClientSession", context: Any, parameters: Any) -> None:
    if isinstance(context.trace_request_ctx, _Way):
        context.trace_request_ctx.used = True


def _proxy(endpoint: Endpoint) -> str | None:
    """Return the proxy that the environment names for a server that is not on this machine.

    aiohttp's own look at the environment is a thread per request, and reads passwords from ~/.netrc.
    """
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(endpoint.base_url)
    host = parts.hostname or ""
    if endpoint.local or host == "localhost" or _is_loopback(host) or proxy_bypass(host):
        return None
    found = getproxies().get(parts.scheme)
    if found and "://" in found and not found.startswith(("http://", "https://")):
        raise UsageError(f"the proxy for {endpoint.base_url} is none of HTTP", f"set {parts.scheme}_proxy or no_proxy")
    return f"http://{found}" if found and "://" not in found else found


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_plain(response: "aiohttp.ClientResponse") -> None:
    """Raise ServerError for what is packed: it was not asked for, would be late, and could unpack to anything."""
    coding = response.headers.get("Content-Encoding", "identity")
    if coding != "identity":
        what = f"{response.url} answers packed as {quoted_text(coding)}, which it was asked not to do"
        raise ServerError(what, "is there a proxy in between?")


async def _body(response: "aiohttp.ClientResponse") -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > _MOST_BODY:
            raise ServerError(f"{response.url} answers more than {_MOST_BODY >> 20} MiB")
    return bytes(body)


def _message(body: bytes) -> str:
    """Return what an error's body says: OpenAI's form, or any text."""
    text = body.decode(errors="replace")
    try:
        made = json.loads(text)
    except (ValueError, RecursionError):
        return quoted_text(text)
    error = made.get("error", made) if isinstance(made, dict) else made
    return quoted_text(str(error.get("message", error) if isinstance(error, dict) else error))


def _after(received: Received | None) -> str:
    return "" if received is None else f", after {received.tokens} tokens of an answer"
