"""The bytes of a streamed answer, each piece with the time it came at, for little of the processor.

aiohttp's way of a piece (a timer set anew, its parser, a reader, a task woken) costs more than the one thing that has
to be done of it at once, looking at the clock. So a protocol of this module stands in for aiohttp's while an answer
streams, and keeps what comes. What is not in the form in which vLLM sends it goes aiohttp's way after all.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.client_proto import ResponseHandler

_BUFFER = 1 << 16
_ROOM_BASE, _ROOM_PER_TOKEN = 1 << 16, 1 << 10
_END = b"0\r\n\r\n"
_EVENTS = re.compile(  # a dot is no end of line
    rb"(?:\r\n)?(?:[0-9a-fA-F]{1,8}\r\ndata: .*\n\n\r\n)*[0-9a-fA-F]{1,8}\r\ndata: \[DONE\]\n\n\r\n0\r\n\r\n"
)


@dataclass(frozen=True)
class Kept:
    """A body in the form in which vLLM sends it: chunks of one event each, the last one ``[DONE]``.

    Attributes:
        begun: what had come before the rest, without the chunks' frames.
        pieces: the rest as it came, with the chunks' frames: lines of their own, which are no events.
        times: when each piece came, that of ``begun`` first; as ``time.perf_counter``.
        size: bytes of all.
    """

    begun: bytes
    pieces: list[bytes]
    times: list[float]
    size: int

    def __iter__(self) -> Iterator[tuple[float, bytes]]:
        """Yield times and pieces."""
        return zip(self.times, (self.begun, *self.pieces), strict=True)

    @property
    def whole(self) -> bool:
        """Whether each chunk is as long as it says."""
        body = b"".join(self.pieces)
        at: int | None = _frame(body)
        while at is not None and body[at : at + 1] != b"0":
            at = _next(body, at)
        return at is not None and body[at:] == _END


def _frame(body: bytes) -> int:
    """Return where the first chunk begins: before it may be the end of another one."""
    return 2 if body.startswith(b"\r\n") else 0


def _next(body: bytes, at: int) -> int | None:
    """Return where the next chunk begins; None if this one is not as long as it says."""
    data = body.find(b"\r\n", at) + 2
    end = data + int(body[at : data - 2], 16)
    return end + 2 if end > data and body[end : end + 2] == b"\r\n" else None


async def listen(
    response: "aiohttp.ClientResponse", max_tokens: int, silence_s: float, take: Callable[[float, bytes], None]
) -> Kept | None:
    """Receive the body of a response, until its end.

    Of one that is not in vLLM's form, or has an error in it, ``take`` gets the times and the body, piece by piece, and
    nothing is returned.

    Raises:
        aiohttp.ClientError: as reading it from aiohttp would.
    """
    content = response.content
    begun = b"".join(iter(content.read_nowait, b""))
    at = time.perf_counter()
    if (tap := _tapped(response, max_tokens)) is None:
        take(at, begun)
    else:
        try:
            await tap.over(silence_s)
        except BaseException:
            with contextlib.suppress(Exception):  # how far it came is part of what is said of a failure
                take(at, begun)
                tap.replay(content, take)
            raise
        if begun[-2:] in (b"", b"\n\n") and b'"error"' not in begun and tap.in_form():
            tap.end(content)
            return Kept(begun, tap.pieces, [at, *tap.times], len(begun) + tap.size)
        take(at, begun)
        tap.replay(content, take)
    async for piece in content.iter_any():
        take(time.perf_counter(), piece)
    return None


def _tapped(response: "aiohttp.ClientResponse", max_tokens: int) -> "_Tap | None":
    """Begin to keep what comes; None where aiohttp has all of it already, or it is not in chunks."""
    connection = response.connection
    if connection is None or connection.protocol is None or connection.transport is None:
        return None
    protocol, transport = connection.protocol, connection.transport
    if response.headers.get("Transfer-Encoding", "").lower() != "chunked" or response.content.is_eof():
        return None
    if not transport.is_reading() or transport.get_protocol() is not protocol:
        return None
    return _Tap(protocol, transport, _ROOM_BASE + _ROOM_PER_TOKEN * max_tokens)


class _Tap(asyncio.BufferedProtocol):
    """Stands in for aiohttp's protocol of a connection, until the end or until ``room`` bytes have come.

    Buffered: a plain one gets a bytes object of 256 KiB from asyncio for each piece, which in a process that has freed
    none of that size costs a map of memory, more than all the rest.
    """

    def __init__(self, protocol: "ResponseHandler", transport: asyncio.Transport, room: int) -> None:
        self.pieces: list[bytes] = []
        self.times: list[float] = []
        self.size = 0
        self._room, self._since = room, time.perf_counter()
        self._protocol, self._transport = protocol, transport
        self._buffer = memoryview(bytearray(_BUFFER))
        self._lost: list[Exception | None] = []
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._watch: asyncio.TimerHandle
        self._read_timeout, protocol.read_timeout = protocol.read_timeout, None
        protocol.start_timeout()  # which ends aiohttp's own
        transport.set_protocol(self)

    async def over(self, silence_s: float) -> None:
        """Wait for what looks like the end, or is more than is kept; raises aiohttp.SocketTimeoutError."""
        import aiohttp

        def look() -> None:
            left = (self.times[-1] if self.times else self._since) + silence_s - time.perf_counter()
            if left > 0:
                self._watch = self._loop.call_later(left, look)
            elif not self._ended.done():
                self._ended.set_exception(aiohttp.SocketTimeoutError("nothing came"))

        look()
        try:
            await self._ended
        finally:
            self._watch.cancel()

    def in_form(self) -> bool:
        """Whether this is the rest of a body as vLLM sends it, from the beginning of a chunk to the end of all."""
        body = b"".join(self.pieces)
        return _EVENTS.fullmatch(body) is not None and _next(body, _frame(body)) is not None and b'"error"' not in body

    def end(self, content: "aiohttp.StreamReader") -> None:
        """Tell aiohttp that the body has ended, and not more of it."""
        import aiohttp

        with self._released():
            self._protocol.data_received(self.pieces[0][: _frame(self.pieces[0])] + _END)
            if not content.at_eof():
                raise aiohttp.ClientPayloadError("chunks are not as long as it says")

    def replay(self, content: "aiohttp.StreamReader", take: Callable[[float, bytes], None]) -> None:
        """Give aiohttp what came, piece by piece, and ``take`` what that is of the body."""
        with self._released():
            for at, piece in zip(self.times, self.pieces, strict=True):
                self._protocol.data_received(piece)
                while data := content.read_nowait():
                    take(at, data)

    @contextlib.contextmanager
    def _released(self) -> Iterator[None]:
        """Let aiohttp have its connection again; that it was lost, if so, comes after its bytes."""
        self._transport.set_protocol(self._protocol)
        self._protocol.read_timeout = self._read_timeout
        try:
            yield
        finally:
            for error in self._lost:
                self._protocol.connection_lost(error)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the transport writes to."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Keep a piece, and see whether it may be the last."""
        piece = self._buffer[:nbytes].tobytes()
        self.times.append(time.perf_counter())
        self.pieces.append(piece)
        self.size += nbytes
        # An end may be cut in two, of which the second part is short.
        if piece.endswith(b"\r\n\r\n") or nbytes < 4 or self.size > self._room:
            self._stop()

    def eof_received(self) -> None:
        """Leave the rest to the transport, which closes itself."""

    def connection_lost(self, exc: Exception | None) -> None:
        """End, and have aiohttp learn of it after the bytes."""
        self._lost.append(exc)
        self._stop()

    def pause_writing(self) -> None:
        """Pass on: a request may still be on its way."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Pass on."""
        self._protocol.resume_writing()

    def _stop(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
