"""HTTP/1.1 connections with limits on the sizes and times of requests.

The parser is httptools: per streamed event it costs 1.4 us of CPU time where h11 costs 4.7. It has no limits of its
own, so they are here. Knows bytes and clocks, nothing of routes and models.

    connection made --> HEAD --headers complete--> BODY --message complete--> IDLE --first byte--> HEAD ...
                     (10 s in all)             (30 s, then a byte rate)    (keep-alive timeout)

Pipelined requests are not served, since one could wait behind a stream for an unknown time. Data that comes during an
answer is dropped, and the connection closes after that answer, so that the client sends its request again. A disconnect
during an answer is seen at once.

A refused request gets an error in OpenAI's format. Then the connection reads and drops data for `LINGER` seconds, so
that a client in the middle of an upload can read the answer, and closes.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.config.serve import HttpConfig, LogConfig
from quire.contracts.request_ids import request_id_of
from quire.entry.http.access.early_refusal import EarlyRefusal
from quire.entry.http.observed.request_lines import AccessLog
from quire.entry.http.sse import DIRECT_BODY
from quire.entry.http.unchunked import Unchunked

LOG = logging.getLogger("quire")
HOP_BY_HOP = (b"connection", b"upgrade", b"http2-settings")
READ_BYTES = 256 * 2**10  # that are read at once
LINGER = 2.0  # seconds that a refused upload is read and dropped
NO_LOG = AccessLog(LogConfig())
MAX_LOGGED = 256  # bytes of a refused request's path in the log


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits of connections; sizes in bytes, times in seconds.

    body_rate   minimum bytes per second of an upload, measured over each `body_timeout`
    stall       seconds after which a client that does not read its answer is disconnected
    max_chunks  maximum chunks of a body without a length: each one costs a call, however small it is
    uploads     maximum sum of all request bodies that are arriving at one moment
    """

    max_header_bytes: int
    max_headers: int
    max_body_bytes: int
    max_url_bytes: int = 16 * 2**10
    max_connections: int = 16_384
    max_chunks: int = 2**16
    uploads: int = 512 * 2**20
    head_timeout: float = 10.0
    body_timeout: float = 30.0
    body_rate: int = 8 * 2**10
    stall: float = 120.0

    @classmethod
    def of(cls, config: HttpConfig, **changes: Any) -> "ConnectionLimits":
        """Make the limits from a configuration."""
        sizes = dict(
            max_header_bytes=config.max_header_bytes,
            max_headers=config.max_headers,
            max_body_bytes=config.max_body_bytes,
            uploads=max(512 * 2**20, config.max_body_bytes),
        )
        return cls(**(sizes | changes))


class Traffic:
    """State that all connections of a server share.

    uploading   bytes of request bodies that are arriving
    refused     called with the status of each refused request
    buffer      takes received bytes until they are parsed, at once
    log         of requests: a refused request without a task has its line from here
    """

    def __init__(self, refused: Callable[[int], None] = lambda status: None, log: AccessLog = NO_LOG) -> None:
        self.uploading = 0
        self.refused, self.log = refused, log
        self.buffer = memoryview(bytearray(READ_BYTES))


class _Reading(Enum):
    IDLE = "between two requests"
    HEAD = "in the request line or the headers"
    BODY = "in the body"


class _Early(Exception):
    """Raised inside a parser callback when a request begins before the previous answer is complete."""


class ChunkedBody:
    """A chunked response body that is written without waiting: the `sse.DirectBody` of a connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        """True while the body is open and the peer reads fast enough."""
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding
            and not (
                cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or cycle.transport.is_closing()
            )
        )

    def write(self, data: bytes) -> None:
        """Queue a chunk."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _refusal(error: httptools.HttpParserError) -> EarlyRefusal:
    """Return the refusal that a callback raised, or one of no HTTP. A frame below that kept it would form a circle."""
    cause = error.__context__
    return cause if isinstance(cause, EarlyRefusal) else EarlyRefusal(400, f"not a valid HTTP request: {error}.")


class LimitedProtocol(HttpToolsProtocol, asyncio.BufferedProtocol):
    """An HTTP/1.1 connection with limits. Buffers as asyncio makes them, 256 KiB for each read, tear the heap."""

    def __init__(self, *, limits: ConnectionLimits, traffic: Traffic, **server: Any) -> None:
        super().__init__(**server)
        self._limits, self._traffic = limits, traffic
        self._reading = _Reading.IDLE
        self._closing = False  # the connection closes after the current answer; further data is dropped
        self._unparsed = 0  # bytes received since the parser last completed an element
        self._head_bytes = self._num_headers = self._body_bytes = self._num_chunks = 0  # of the message being read
        self._body_bytes_before = 0  # value of `_body_bytes` when the body's timer was last set
        self._watch: asyncio.TimerHandle | None = None  # ends a head or a body that takes too long
        self._stall: asyncio.TimerHandle | None = None
        self._began = self.loop.time()  # of the head that is read
        self._upgrade: list[bytes] | None = None  # request line of a request that asks for another protocol

    # --- the transport ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start a connection. Refuse it with 503 when there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._closing = True
            self._traffic.refused(503)
            many = EarlyRefusal(503, "too many connections: try again in a moment.", "engine_overloaded")
            self._answer(many, self._named(many, answerable=True))
            transport.close()
        else:
            self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after either side closed the connection."""
        self._unwatch()
        self._end_upload()
        if self._stall is not None:
            self._stall.cancel()
        super().connection_lost(exc)
        self._let_request_go()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes."""
        return self._traffic.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take bytes from the buffer."""
        self.data_received(self._traffic.buffer[:nbytes])

    def data_received(self, data: bytes | memoryview) -> None:
        """Parse received bytes and check the limits."""
        if self._closing:
            return
        self._unset_keepalive_if_required()
        self._unparsed += len(data)
        if not self._feed(data):
            return
        if self._unparsed > self._limits.max_header_bytes:
            self._refuse(self._too_much())
        elif self._watch is None and self._reading is not _Reading.BODY and not self._responding:
            self._watch_head()
        elif self._watch is None and self._reading is _Reading.BODY:
            self._watch = self.loop.call_later(self._limits.body_timeout, self._body_is_late)

    def pause_writing(self) -> None:
        """Start the `stall` timer: the peer reads more slowly than we write."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self._limits.stall, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the `stall` timer: the peer has caught up."""
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    # --- the parser's callbacks -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a request at its first byte."""
        if self._responding:
            raise _Early
        super().on_message_begin()
        self._reading = _Reading.HEAD
        self._head_bytes = self._num_headers = self._body_bytes = self._body_bytes_before = self._num_chunks = 0

    def on_url(self, url: bytes) -> None:
        """Take a part of the URL."""
        super().on_url(url)
        self._head_bytes += len(url)
        if len(self.url) > self._limits.max_url_bytes:
            raise EarlyRefusal(
                414, f"the URL is longer than {self._limits.max_url_bytes} bytes: shorten it.", "url_too_long"
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer after the body. Trailers count for the limits and are dropped."""
        self._num_headers += 1
        self._head_bytes += len(name) + len(value) + 4  # ": " and the end of the line
        limits = self._limits
        if self._num_headers > limits.max_headers:
            raise EarlyRefusal(
                431,
                f"the request has more than {limits.max_headers} headers: send fewer, or start the "
                "server with a higher --max-headers.",
                "headers_too_large",
            )
        if self._head_bytes > limits.max_header_bytes:
            raise self._too_much()
        if self._reading is _Reading.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request. Its body may still be arriving."""
        self._unparsed = 0
        self._unwatch()
        self._check_host()
        if self.parser.should_upgrade():
            version = self.parser.get_http_version().encode()
            self._upgrade = [self.parser.get_method(), self.url, b"HTTP/" + version]
            return
        announced = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if int(announced) > self._limits.max_body_bytes:
            raise self._body_too_large()
        super().on_headers_complete()
        self.scope["extensions"] = {DIRECT_BODY: ChunkedBody(self.cycle)}  # type: ignore[dict-item]
        self._reading = _Reading.BODY

    def on_chunk_header(self) -> None:
        """Begin a chunk of the body."""
        self._num_chunks += 1
        if self._num_chunks > (most := self._limits.max_chunks):
            raise EarlyRefusal(413, f"the body has more than {most} chunks: send larger ones.", "body_too_large")

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._unparsed = 0
        self._body_bytes += len(body)
        self._traffic.uploading += len(body)
        if self._body_bytes > self._limits.max_body_bytes:
            raise self._body_too_large()
        if self._traffic.uploading > self._limits.uploads:
            raise EarlyRefusal(503, "too many uploads at once: try again in a moment.", "engine_overloaded")
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Finish reading a request."""
        if self._upgrade is not None:
            return
        self._unparsed = 0
        self._unwatch()
        self._reading = _Reading.IDLE
        self._end_upload()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Let the request go, with what nobody has read of its body: the object lives until the next request."""
        self.cycle.body = bytearray()
        self._let_request_go()
        super().on_response_complete()

    # --- inside ---------------------------------------------------------------------------------------------------

    @property
    def _responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _let_request_go(self) -> None:
        """Break the circle scope -> `ChunkedBody` -> request -> scope, which would wait for a garbage collection."""
        if self.cycle is not None and (extensions := self.cycle.scope.get("extensions")):
            extensions.clear()

    def _feed(self, data: bytes | memoryview) -> bool:
        """Parse data. Return False when the request was refused or dropped."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._continue_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if self._responding and self._reading is _Reading.IDLE:
                self._hear_no_more()
            else:
                self._refuse(_refusal(error))
            return False
        return True

    def _check_host(self) -> None:
        """Refuse a request of HTTP/1.1 without a Host header, and any request with several (RFC 9112, section 3.2)."""
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() != "1.0"):
            found = f"has {hosts} Host headers" if hosts else "has no Host header"
            raise EarlyRefusal(400, f"the request {found}: HTTP/1.1 needs one, such as `Host: localhost`.")

    def _continue_without_upgrade(self, rest: bytes | memoryview) -> bool:
        """Serve a request that offers a protocol upgrade (HTTP/2, WebSocket) as an ordinary request. The parser stops
        at such a request and would lose its body, so it is parsed again without the upgrade headers."""
        line, self._upgrade = self._upgrade, None
        assert line is not None
        if line[0] == b"CONNECT":
            self._reading = _Reading.HEAD
            self._refuse(EarlyRefusal(405, "CONNECT is not allowed: this server is not a proxy.", "method_not_allowed"))
            return False
        kept = [b": ".join(header) for header in self.headers if header[0] not in HOP_BY_HOP]
        self.parser = httptools.HttpRequestParser(self)
        return self._feed(b"\r\n".join([b" ".join(line), *kept, b"", rest]))

    def _hear_no_more(self) -> None:
        """Drop further data, and close the connection after the current answer."""
        self._closing = True
        self._unwatch()
        self.cycle.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, Unchunked(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    def _watch_head(self) -> None:
        self._began = self.loop.time()
        self._watch = self.loop.call_later(self._limits.head_timeout, self._head_is_late)

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _head_is_late(self) -> None:
        message = f"the headers did not arrive within {self._limits.head_timeout:g} s."
        self._refuse(EarlyRefusal(408, message, "request_timeout"))

    def _body_is_late(self) -> None:
        limits = self._limits
        arrived = self._body_bytes - self._body_bytes_before
        if self.flow.read_paused or arrived >= limits.body_rate * limits.body_timeout:
            self._body_bytes_before = self._body_bytes
            self._watch = self.loop.call_later(limits.body_timeout, self._body_is_late)
        else:
            self._refuse(
                EarlyRefusal(
                    408,
                    f"the body arrives at less than {limits.body_rate} bytes per second: send it faster.",
                    "request_timeout",
                )
            )

    def _refuse(self, refused: EarlyRefusal) -> None:
        """Send the error, if no answer has begun, and close the connection."""
        LOG.debug("%s refused with %d: %s", self.client, refused.status, refused)
        self._unwatch()
        self._closing = True
        self._traffic.refused(refused.status)
        self._end_upload()
        if self._reading is _Reading.BODY:
            answerable = not self.cycle.response_started
            self.cycle.disconnected = True  # its task must not answer any more
            self.cycle.message_event.set()
        else:
            answerable = not self._responding
        request_id = self._named(refused, answerable)
        if not answerable:
            self.transport.close()
            return
        self._answer(refused, request_id)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER, self.transport.abort)

    def _named(self, refused: EarlyRefusal, answerable: bool) -> str:
        """Return the id of a refused request, and have it logged: by its task if there is one, else here."""
        begun = self._reading is not _Reading.IDLE  # else headers and URL are those of the request before
        headers, state = (self.headers, self.scope["state"]) if begun else ([], {})
        request_id: str = state.get("request_id") or request_id_of(headers)
        facts = {"error": refused.code} if refused.code else {}
        if self._reading is _Reading.BODY:
            state["request_id"] = request_id
            if answerable:
                state["refused"] = (refused.status, facts)
            return request_id
        path = self.url.partition(b"?")[0][:MAX_LOGGED].decode("latin-1") if begun else ""
        method = self.parser.get_method().decode("latin-1") if path else "-"  # parsed before the path
        known = {"client": self.client, "method": method, "path": path or "-", "state": {"request_id": request_id}}
        self._traffic.log.tell(known, refused.status, self.loop.time() - self._began, **facts)
        return request_id

    def _answer(self, refused: EarlyRefusal, request_id: str) -> None:
        path = "" if self._reading is _Reading.IDLE else self.url.decode("latin-1")
        self.transport.write(refused.answer(path, request_id, self.server_state.default_headers))

    def _end_upload(self) -> None:
        self._traffic.uploading -= self._body_bytes
        self._body_bytes = 0

    def _too_much(self) -> EarlyRefusal:
        limit = self._limits.max_header_bytes
        if self._reading is _Reading.BODY:
            return EarlyRefusal(400, f"{limit} bytes of chunk headers or trailers without a body.")
        return EarlyRefusal(
            431,
            f"request line and headers have more than {limit} bytes: send fewer, or start the server "
            "with a higher --max-header-bytes.",
            "headers_too_large",
        )

    def _body_too_large(self) -> EarlyRefusal:
        return EarlyRefusal(
            413,
            f"the body has more than {self._limits.max_body_bytes} bytes: send less, or start the "
            "server with a higher --max-body-bytes.",
            "body_too_large",
        )
