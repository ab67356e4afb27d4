"""HTTP/1.1 connections to backends, kept open between requests.

The parser is httptools, which the package needs for its own server: no HTTP client is among its dependencies that hands
over each piece of a body as it arrives. Knows bytes and connections, nothing of what requests mean.

    idle --ask--> waiting for the head --> body, piece by piece --> end --give_back--> idle, or closed
"""

import asyncio
import errno
import functools
import ssl
import time
from collections.abc import Callable, Iterable

import httptools

from quire.router.addresses import Address

Header = tuple[bytes, bytes]
IDLE_SECONDS = 4.0  # uvicorn, under vLLM, closes idle connections after 5 s
MOST_IDLE = 256  # connections that are kept for a backend
READ_BYTES = 64 * 2**10  # of an answer that are read at once
MOST_UNREAD = 256 * 2**10  # bytes of a body that wait for a slow client; then the backend is not read
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate te trailer transfer-encoding upgrade http2-settings "
    b"expect proxy-authorization".split()
)
LEFT_OUT = HOP_BY_HOP | {b"date"}  # headers of answers that are not passed on: the router's listener dates them


class UpstreamError(Exception):
    """A connection to a backend failed. `reason`: broken, connect, files or timeout; `unheard`: no byte had come."""

    def __init__(self, message: str, reason: str = "broken", *, unheard: bool = True) -> None:
        super().__init__(message)
        self.reason, self.unheard = reason, unheard


class Upstream(asyncio.BufferedProtocol):
    """A connection to a backend; one request at a time.

    buffer            takes received bytes until they are parsed, at once; other connections use it, too
    status, headers   of the answer, once `ask` has returned
    lost              the reason why no further request can be sent; "" if one can
    arrived           `time.perf_counter` when the oldest piece came that `read` has not returned
    sink              gets pieces of the body while `read` waits, without waking it; False: `read` returns the piece
    """

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self.arrived = self.idle_since = 0.0
        self.reused = False
        self.lost = ""
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = self._unread = 0
        self.headers: list[Header] = []
        self.sink: Callable[[bytes], bool] | None = None
        self._pieces: list[bytes] = []
        self._heard = self._headed = self._ended = self._keep_alive = self._until_close = False

    async def ask(self, method: bytes, target: bytes, headers: Iterable[Header], body: bytes) -> None:
        """Send a request and wait for the head of its answer. Raises `UpstreamError`."""
        assert self._transport is not None
        self._begin()
        lines = [
            b"%s %s HTTP/1.1" % (method, target),
            *(name + b": " + value for name, value in headers),
            b"content-length: %d" % len(body),
        ]
        self._transport.write(b"\r\n".join((*lines, b"", body)))
        while not self._headed:
            if self.lost:
                raise UpstreamError(self.lost, unheard=not self._heard)
            await self._wait()

    async def read(self) -> bytes:
        """Return the bytes of the body that have come; b"" at its end. Raises `UpstreamError` if it breaks off."""
        while not self._pieces:
            if self._ended:
                return b""
            if self.lost:
                raise UpstreamError(self.lost, unheard=False)
            await self._wait()
        pieces, self._pieces = self._pieces, []
        if self._unread > MOST_UNREAD and self._transport is not None and not self.lost:
            self._transport.resume_reading()
        self._unread = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def can_be_kept(self) -> bool:
        """True when the answer has come whole and the connection can be used again."""
        return self._ended and self._keep_alive and not self.lost and not self._pieces

    def abort(self, reason: str = "the router closed the connection") -> None:
        """Close the connection at once, so that the backend stops working for it."""
        self.lost = self.lost or reason
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    # --- the transport ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport of a new connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse what came, and wake the request that waits for it."""
        if not self._pieces:
            self.arrived = time.perf_counter()
        self._heard = True
        if self._ended:
            return self.abort("the backend sent bytes after its answer")
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except httptools.HttpParserUpgrade:
            return self.abort("the backend answered with another protocol")
        except httptools.HttpParserError as error:
            return self.abort(f"the backend's answer is no HTTP: {error}")
        if self._pieces and self.sink is not None and self._waiter is not None and self.sink(b"".join(self._pieces)):
            self._pieces.clear()
            self._unread = 0
            if not self._ended:
                return
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """End an answer of unknown length, or break one off."""
        if self._headed and self._until_close and error is None:
            self._ended = True
        self.lost = self.lost or f"the connection broke off ({error or 'closed by the backend'})"
        self.sink = None
        del self._parser  # both refer to this connection, which would wait for a garbage collection
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
        self._tls = _certificates() if address.tls else None
        self._made = functools.partial(Upstream, memoryview(bytearray(READ_BYTES)))

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

    async def fetch(
        self, method: bytes, target: bytes, headers: list[Header], body: bytes, timeout: float
    ) -> tuple[int, bytes]:
        """Send a request and return status and body of the whole answer. Raises `UpstreamError`."""
        try:
            async with asyncio.timeout(timeout):
                connection = await self.ask(method, target, headers, body)
                try:
                    return connection.status, await read_all(connection)
                finally:
                    self.give_back(connection)
        except TimeoutError:
            raise UpstreamError(f"no answer within {timeout:g} s", "timeout") from None

    def give_back(self, connection: Upstream) -> None:
        """End the use of a connection; it is kept if it can be used again."""
        if not connection.can_be_kept() or len(self._idle) >= MOST_IDLE:
            return connection.abort()
        connection.idle_since, connection.reused = time.monotonic(), True
        self._idle.append(connection)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().abort()

    async def _take(self) -> Upstream:
        oldest = time.monotonic() - IDLE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost and connection.idle_since >= oldest:
                return connection
            connection.abort()
        host, port = self._address.host, self._address.port
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout):
                name = (self._address.name or host) if self._tls else None  # that the certificate must have
                _, connection = await loop.create_connection(
                    self._made, host, port, ssl=self._tls, server_hostname=name
                )
                return connection
        except TimeoutError:
            raise UpstreamError(f"no connection within {self._timeout:g} s", "timeout") from None
        except OSError as error:
            reason = "files" if error.errno in (errno.EMFILE, errno.ENFILE) else "connect"
            raise UpstreamError(f"no connection: {error.strerror or error}", reason) from None


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Return the system's certificates, read once for all backends."""
    return ssl.create_default_context()


async def read_all(connection: Upstream) -> bytes:
    """Return the whole rest of the body. Raises `UpstreamError` if it breaks off."""
    pieces = []
    while piece := await connection.read():
        pieces.append(piece)
    return b"".join(pieces)
