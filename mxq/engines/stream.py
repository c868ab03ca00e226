"""The bytes of a streamed answer, each piece with the time it came at, for little of the processor.

aiohttp's way of a piece (a timer set anew, its parser, a reader, a task woken) costs more than the one thing that has
to be done of it at once, looking at the clock. So aiohttp's connection is paused while an answer streams; what comes is
read past it, of all connections in one turn of the loop, and kept. What is not in the form in which vLLM sends it goes
aiohttp's way after all.
"""

import asyncio
import contextlib
import os
import re
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.client_proto import ResponseHandler

_MOST_READ = 1 << 16
_MOST_FILES = 256
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
        at, end = _frame(body), len(body) - len(_END)
        while 0 <= at < end:
            at = _next(body, at)
        return at == end


def _frame(body: bytes) -> int:
    """Return where the first chunk begins: before it may be the end of another one."""
    return 2 if body.startswith(b"\r\n") else 0


def _next(body: bytes, at: int) -> int:
    """Return where the next chunk begins; -1 if this one is not as long as it says."""
    data = body.find(b"\r\n", at) + 2
    try:
        end = data + int(body[at : data - 2], 16)
    except ValueError:
        return -1
    return end + 2 if end > data and body[end : end + 2] == b"\r\n" else -1


async def listen(
    ears: "Ears",
    response: "aiohttp.ClientResponse",
    max_tokens: int,
    silence_s: float,
    take: Callable[[float, bytes], None],
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
    if (tap := ears.tap(response, max_tokens)) is None:
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


class Ears:
    """What listens to all connections at once: a selector of the kernel that is one file to the loop.

    For each file of its own the loop makes a list, a handle and calls of four functions when something comes.
    """

    def __init__(self) -> None:
        self._taps: dict[int, _Tap] = {}
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        if self._epoll is not None:
            self._loop.add_reader(self._epoll.fileno(), self._hear)

    def close(self) -> None:
        """Listen no more."""
        if self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()

    def tap(self, response: "aiohttp.ClientResponse", max_tokens: int) -> "_Tap | None":
        """Begin to keep what comes; None where aiohttp has all of it already, or it is not in chunks, or encrypted."""
        connection = response.connection
        if self._epoll is None or connection is None or connection.protocol is None or connection.transport is None:
            return None
        transport = connection.transport
        if response.headers.get("Transfer-Encoding", "").lower() != "chunked" or response.content.is_eof():
            return None
        if not transport.is_reading() or transport.get_extra_info("sslcontext") is not None:
            return None
        file = transport.get_extra_info("socket").fileno()
        tap = _Tap(self, connection.protocol, transport, file, _ROOM_BASE + _ROOM_PER_TOKEN * max_tokens)
        self._taps[file] = tap
        self._epoll.register(file, select.EPOLLIN)
        return tap

    def leave(self, tap: "_Tap") -> None:
        """Listen no more to one of them; its file may have been closed meanwhile, and be another one's now."""
        if self._epoll is not None and self._taps.get(tap.file) is tap:
            del self._taps[tap.file]
            with contextlib.suppress(OSError):
                self._epoll.unregister(tap.file)

    def _hear(self) -> None:
        assert self._epoll is not None
        for file, _ in self._epoll.poll(0, _MOST_FILES):
            self._taps[file].hear()


class _Tap:
    """One connection, until the end or until ``room`` bytes have come."""

    def __init__(
        self, ears: Ears, protocol: "ResponseHandler", transport: asyncio.Transport, file: int, room: int
    ) -> None:
        self.pieces: list[bytes] = []
        self.times: list[float] = []
        self.size = 0
        self._room, self._since = room, time.perf_counter()
        self._ears, self._protocol, self._transport, self.file = ears, protocol, transport, file
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._watch: asyncio.TimerHandle
        self._read_timeout, protocol.read_timeout = protocol.read_timeout, None
        protocol.start_timeout()  # which ends aiohttp's own
        transport.pause_reading()

    def hear(self) -> None:
        """Keep a piece, and see whether it may be the last."""
        try:
            piece = os.read(self.file, _MOST_READ)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if piece:
            self.times.append(time.perf_counter())
            self.pieces.append(piece)
            self.size += len(piece)
        # An end may be cut in two, of which the second part is short. That of a connection is seen by its transport.
        if piece.endswith(b"\r\n\r\n") or len(piece) < 4 or self.size > self._room:
            self._ears.leave(self)
            if not self._ended.done():
                self._ended.set_result(None)

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
        return _EVENTS.fullmatch(body) is not None and _next(body, _frame(body)) > 0 and b'"error"' not in body

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
        """Let aiohttp have its connection again."""
        self._ears.leave(self)
        self._protocol.read_timeout = self._read_timeout
        try:
            yield
        finally:
            self._transport.resume_reading()
