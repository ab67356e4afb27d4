"""Server-sent events as an ASGI response: frames in bytes, comments while nothing happens, one send per batch.

Knows framing and timing only. The response starts with the first event, so that what fails before it still gets a
status of its own; a stream that is silent for longer than the keep-alive interval starts with a comment.

Between start and end an event may take a short cut: `push` writes it into the connection's buffer, where the server
offers that, past all layers of the application.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Protocol

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
RawHeaders = Iterable[tuple[bytes, bytes]]

DONE = b"data: [DONE]\n\n"
DIRECT_BODY = "direct-body"  # the ASGI extension under which a server offers a `DirectBody`
COMMENT = b": keep-alive\n\n"
EVENT_STREAM: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"text/event-stream; charset=utf-8"),
                                                 (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class DirectBody(Protocol):
    """A response body that is written without waiting."""

    @property
    def ready(self) -> bool:
        """Whether it has begun, goes on, and its reader keeps up."""

    def write(self, data: bytes) -> None:
        """Queue the next piece; only when `ready`."""


def frame(data: bytes) -> bytes:
    """One event; `data` is JSON, which holds no line break."""
    return b"data: " + data + b"\n\n"


class EventStream:
    """One streamed response. `write` what there is, `end` it, and `stop_comments` in any case."""

    def __init__(self, send: Send, headers: RawHeaders, keep_alive: float, direct: DirectBody | None = None) -> None:
        """`keep_alive` seconds of silence bring a comment; 0: never. `direct`: the body, when the server offers it."""
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
        """Whether `push` may be called now; else `write`."""
        return self._direct is not None and self._comment is None and self._direct.ready

    def push(self, events: bytes) -> None:
        """Send framed events in one piece, at once."""
        assert self._direct is not None
        self._direct.write(events)
        self._last = self._loop.time()

    async def write(self, events: bytes) -> None:
        """Send framed events in one piece; waits when the client reads slowly."""
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
        """Send nothing by itself any more; to be called on every way out."""
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
