"""Server-sent events as an ASGI response: framing, keep-alive comments, one send per batch of events.

Knows framing and timing only. The response starts with the first event, so that an earlier error can still be sent with
its own status. A stream without an event for the keep-alive interval starts with a comment.

Between start and end, `push` can write an event directly into the connection's buffer, past all middleware. It needs a
server with the ASGI extension `DIRECT_BODY`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Protocol

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
RawHeaders = Iterable[tuple[bytes, bytes]]

DONE = b"data: [DONE]\n\n"
DIRECT_BODY = "direct-body"  # the ASGI extension under which a server offers a `DirectBody`
COMMENT = b": keep-alive\n\n"
EVENT_STREAM: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class DirectBody(Protocol):
    """A response body that is written without waiting."""

    @property
    def ready(self) -> bool:
        """True while the body is open and its reader is fast enough."""

    def write(self, data: bytes) -> None:
        """Queue the next piece. Call it only when `ready`."""


def frame(data: bytes) -> bytes:
    """Return a server-sent event that carries `data`, which is JSON without line breaks."""
    return b"data: " + data + b"\n\n"


class EventStream:
    """A streamed response. Call `write` for events, `end` at the end, and `stop_comments` in every case."""

    def __init__(self, send: Send, headers: RawHeaders, keep_alive: float, direct: DirectBody | None = None) -> None:
        """Make the stream; nothing is sent yet.

        keep_alive   seconds without an event after which a comment is sent; 0 = never
        direct       the connection's body for `push`, if the server offers it
        """
        self._send = send
        self._direct = direct
        self._headers = [*EVENT_STREAM, *headers]
        self._loop = asyncio.get_running_loop()
        self._interval = keep_alive
        self._last = self._loop.time()
        self._timer = self._loop.call_later(keep_alive, self._tick) if keep_alive > 0 else None
        self._comment: asyncio.Task[None] | None = None
        self._sending = False
        self.started = False

    @property
    def ready(self) -> bool:
        """True when `push` may be called; otherwise use `write`."""
        return self._direct is not None and self._comment is None and self._direct.ready

    def push(self, events: bytes) -> None:
        """Write framed events to the connection's buffer, without waiting."""
        assert self._direct is not None
        self._direct.write(events)
        self._last = self._loop.time()

    async def write(self, events: bytes) -> None:
        """Send framed events in one piece. Waits while the client reads slowly."""
        if self._comment is not None:
            await self._comment
            self._comment = None
        self._sending = True
        await self._put(events)
        self._sending = False
        self._last = self._loop.time()

    async def end(self, events: bytes = DONE) -> None:
        """Send the last events and finish the response."""
        if self._comment is not None:
            await self._comment
        self.stop_comments()
        await self._put(events, more=False)

    def stop_comments(self) -> None:
        """Send no more keep-alive comments. Call it however the stream ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._comment is not None:
            self._comment.cancel()
            self._comment = None

    async def _put(self, events: bytes, more: bool = True) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._send({"type": "http.response.body", "body": events, "more_body": more})

    def _tick(self) -> None:
        now = self._loop.time()
        left = self._last + self._interval - now
        if left <= 0.0:
            if not self._sending and (self._comment is None or self._comment.done()):
                self._comment = self._loop.create_task(self._put(COMMENT))
            self._last, left = now, self._interval
        self._timer = self._loop.call_later(left, self._tick)
