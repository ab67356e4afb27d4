"""An HTTP request and its answer over plain ASGI: body in, JSON or events out, and a watch for disconnected clients.

Does not use Starlette's request and response objects, because those cost a task group per response. Knows nothing of
the content of requests.
"""

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

from quire.contracts.errors import InvalidParameter
from quire.entry.http.errors import http_error
from quire.entry.http.sse import DIRECT_BODY, DONE, EventStream, Send, frame

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
MAX_WARNINGS = 8


class ClientGone(Exception):
    """The client has disconnected, so there is no one to answer."""


class Watch:
    """`async with watch:` cancels the block when the client disconnects. The block then raises `ClientGone`."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    def stop(self) -> None:
        """Stop watching: the answer is complete, and a disconnect cancels nothing any more."""
        self._listener.cancel()

    async def __aenter__(self) -> "Watch":
        owner = asyncio.current_task()
        assert owner is not None
        self._owner = owner
        self._listener = asyncio.get_running_loop().create_task(self._listen())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, *trace: object) -> None:
        self._listener.cancel()
        if not self._gone:
            return
        cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
        if not cancelled:  # the block finished just before the cancellation reached it
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        if self._owner.uncancel():
            raise asyncio.CancelledError  # the task was also cancelled by someone else
        if cancelled:
            raise ClientGone from error

    async def _listen(self) -> None:
        with suppress(asyncio.CancelledError):  # kept by the task, it would form a circle with this watch
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self._gone = True
            self._owner.cancel()


class Exchange:
    """An HTTP request that is being answered, with its response: reads the body, sends the answer or the error.

    size       bytes of the request's body, once it was read
    warnings   texts of the response's `x-quire-warning` headers
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self.warnings: list[str] = []
        self.words: Sequence[tuple[str, str]] = ()  # (pattern, this API's name): replacements in errors and warnings
        self._stream: EventStream | None = None
        self._started = False
        # Last events of a stream that fails, made from the status and body of the error.
        self.ending: Callable[[int, bytes], bytes] = lambda status, body: frame(body) + DONE
        self.size = 0
        self._named: str | None = scope.get("state", {}).get("request_id")  # set by `RequestScope`
        self.request_id = self._named or secrets.token_hex(8)

    def header(self, name: bytes) -> str | None:
        """Return a request header by its lower-case name; None if absent."""
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1").strip()

    def name(self, from_body: str | None = None) -> str:
        """Set and return the request id: a valid X-Request-Id header, else `from_body`, else a random id."""
        given = self.header(b"x-request-id")
        if given is not None and REQUEST_ID.fullmatch(given):
            self.request_id = self._named or given
        elif from_body is not None:
            if not REQUEST_ID.fullmatch(from_body):
                raise InvalidParameter(
                    "request_id must be 1 to 128 printable ASCII characters without spaces.", param="request_id"
                )
            self.request_id = from_body
        return self.request_id

    def warn(self, text: str) -> None:
        """Add an `x-quire-warning` header to the response, up to `MAX_WARNINGS`."""
        if len(self.warnings) < MAX_WARNINGS and (text := self._own_words(text)) not in self.warnings:
            self.warnings.append(text)

    async def body(self) -> bytes:
        """Read the whole request body. Raises `ClientGone`."""
        message = await self._receive()
        parts: list[bytes] = []
        while message["type"] == "http.request":
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                body = b"".join(parts)
                self.size = len(body)
                return body
            message = await self._receive()
        raise ClientGone

    def watch(self) -> Watch:
        """Return a watch over the connection. Use it after the body was read."""
        return Watch(self._receive)

    async def reply(
        self,
        body: bytes,
        *,
        status: int = 200,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """Send the whole answer."""
        raw = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *self._own_headers()]
        raw += [(name.encode(), value.encode("latin-1")) for name, value in headers]
        self._started = True
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def events(self, keep_alive: float) -> EventStream:
        """Return an event stream for the answer, which starts with the first event. `keep_alive`: see `EventStream`."""
        direct = self.scope.get("extensions", {}).get(DIRECT_BODY)
        self._stream = EventStream(self._send, self._own_headers(), keep_alive, direct)
        return self._stream

    async def fail(self, error: BaseException) -> None:
        """Send an error: as a response with its status, or as the last event of a stream that has begun."""
        answer = http_error(error)
        self.scope.setdefault("state", {})["error"] = answer.code or answer.kind  # for the access log and spans
        answer.message = self._own_words(answer.message)
        answer.param = answer.param and self._own_words(answer.param).partition(".")[0]
        if self._stream is not None:
            self._stream.stop_comments()
        if self._stream is not None and self._stream.started:
            await self._stream.end(self.ending(answer.status, answer.body()))
        elif not self._started:
            await self.reply(answer.body(), status=answer.status, headers=answer.headers)

    def _own_words(self, text: str) -> str:
        for pattern, own in self.words:
            text = re.sub(pattern, own, text)
        return text

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        warnings = [(b"x-quire-warning", text.encode("ascii", "replace")) for text in self.warnings]
        return [(b"x-request-id", self.request_id.encode("latin-1")), *warnings]
