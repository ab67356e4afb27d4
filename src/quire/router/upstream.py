"""HTTP/1.1 connections to backends, kept open between requests.

The parser is httptools, which the package needs for its own server: no HTTP client is among its dependencies that hands
over each piece of a body as it arrives. Knows bytes and connections, nothing of what requests mean.

    idle --ask--> waiting for the head --> body, piece by piece --> end --release--> idle, or closed
"""

import asyncio
import ssl
import time
from collections.abc import Iterable

import httptools

from quire.router.settings import Address

Header = tuple[bytes, bytes]
IDLE_SECONDS = 4.0  # uvicorn, under vLLM, closes idle connections after 5 s
MOST_IDLE = 256  # connections that are kept for a backend
MOST_UNREAD = 256 * 2**10  # bytes of a body that wait for a slow client; then the backend is not read
HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"te", b"trailer",
                        b"transfer-encoding", b"upgrade", b"http2-settings", b"expect", b"proxy-authorization"))


class UpstreamError(Exception):
    """A connection to a backend failed. `unheard`: no byte of an answer had come."""

    def __init__(self, message: str, *, unheard: bool = True) -> None:
        super().__init__(message)
        self.unheard = unheard


class NoConnection(UpstreamError):
    """A backend took no connection."""


class Upstream(asyncio.Protocol):
    """A connection to a backend; one request at a time.

    status, headers   of the answer, once `ask` has returned
    arrived           `time.perf_counter` when the oldest piece came that `read` has not returned
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.arrived = 0.0
        self.reused = False
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._lost = ""  # the reason why the connection can be used no more
        self._begin()

    @property
    def closed(self) -> bool:
        """True when no further request can be sent."""
        return bool(self._lost)

    async def ask(self, method: bytes, target: bytes, headers: Iterable[Header], body: bytes) -> None:
        """Send a request and wait for the head of its answer. Raises `UpstreamError`."""
        assert self._transport is not None
        self._begin()
        lines = [b"%s %s HTTP/1.1" % (method, target), *(name + b": " + value for name, value in headers),
                 b"content-length: %d" % len(body)]
        self._transport.write(b"\r\n".join((*lines, b"", body)) if body else b"\r\n".join((*lines, b"", b"")))
        while not self._headed:
            if self._lost:
                raise UpstreamError(self._lost, unheard=not self._heard)
            await self._wait()

    async def read(self) -> bytes:
        """Return the bytes of the body that have come; b"" at its end. Raises `UpstreamError` if it breaks off."""
        while not self._pieces:
            if self._ended:
                return b""
            if self._lost:
                raise UpstreamError(self._lost, unheard=False)
            await self._wait()
        pieces, self._pieces = self._pieces, []
        if self._unread > MOST_UNREAD and self._transport is not None and not self._lost:
            self._transport.resume_reading()
        self._unread = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def release(self) -> bool:
        """End the use of the connection. Return True if it can be used again; else it is closed."""
        if self._ended and self._keep_alive and not self._lost and not self._pieces:
            self.idle_since = time.monotonic()
            self.reused = True
            return True
        self.abort()
        return False

    def abort(self) -> None:
        """Close the connection at once, so that the backend stops working for it."""
        self._lost = self._lost or "the router closed the connection"
        if self._transport is not None:
            self._transport.abort()

    # --- the transport ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._pieces:
            self.arrived = time.perf_counter()
        self._heard = True
        if self._ended:
            return self._lose("the backend sent bytes after its answer")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return self._lose("the backend answered with another protocol")
        except httptools.HttpParserError as error:
            return self._lose(f"the backend's answer is no HTTP: {error}")
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if self._headed and self._until_close and error is None:
            self._ended = True
        self._lost = self._lost or f"the connection broke off ({error or 'closed by the backend'})"
        self._wake()

    # --- the parser's callbacks -----------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header of the answer; trailers are dropped."""
        if not self._headed:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Take the end of the head. Interim answers (1xx) are dropped."""
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers = []
            return
        self._headed = True
        self._until_close = not any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        self._keep_alive = bool(self._parser.should_keep_alive()) and not self._until_close

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._pieces.append(body)
        self._unread += len(body)
        if self._unread > MOST_UNREAD and self._transport is not None:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """Take the end of the body."""
        self._ended = self._headed

    # --- inside ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers = 0, []
        self._pieces: list[bytes] = []
        self._unread = 0
        self._heard = self._headed = self._ended = self._keep_alive = self._until_close = False

    def _lose(self, reason: str) -> None:
        self._lost = reason
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Pool:
    """The connections to a backend: `take` gives one that is idle, or a new one."""

    def __init__(self, address: Address, connect_timeout: float) -> None:
        self._address, self._timeout = address, connect_timeout
        self._idle: list[Upstream] = []
        self._tls = ssl.create_default_context() if address.tls else None

    async def ask(self, method: bytes, target: bytes, headers: list[Header], body: bytes) -> Upstream:
        """Send a request and return the connection with the head of the answer. Raises `UpstreamError`.

        A connection that was closed while it was idle is no fault: then the request goes through a new one.
        """
        headers = [(b"host", self._address.authority.encode()), *headers]
        target = self._address.base.encode() + target
        while True:
            connection = await self._take()
            try:
                await connection.ask(method, target, headers, body)
                return connection
            except UpstreamError as error:
                connection.abort()
                if not (connection.reused and error.unheard):
                    raise
            except BaseException:
                connection.abort()
                raise

    def give_back(self, connection: Upstream) -> None:
        """End the use of a connection; it is kept if it can be used again."""
        if connection.release():
            self._idle.append(connection)
            if len(self._idle) > MOST_IDLE:
                self._idle.pop(0).abort()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().abort()

    async def _take(self) -> Upstream:
        oldest = time.monotonic() - IDLE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and connection.idle_since >= oldest:
                return connection
            connection.abort()
        host, port = self._address.host, self._address.port
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout):
                _, connection = await loop.create_connection(Upstream, host, port, ssl=self._tls)
                return connection
        except TimeoutError:
            raise NoConnection(f"no connection within {self._timeout:g} s") from None
        except OSError as error:
            raise NoConnection(f"no connection: {error.strerror or error}") from None


async def read_all(connection: Upstream) -> bytes:
    """Return the whole rest of the body. Raises `UpstreamError` if it breaks off."""
    pieces = []
    while piece := await connection.read():
        pieces.append(piece)
    return b"".join(pieces)
