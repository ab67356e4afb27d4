"""Connections of a listening socket until their TLS handshake is done: few at once, each for a short time."""

import asyncio
import logging
import socket
import ssl
from asyncio import sslproto
from collections.abc import Callable
from dataclasses import dataclass

LOG = logging.getLogger("quire")
HANDSHAKE = 10.0  # seconds for a TLS handshake
HANDSHAKES = 256  # most at once
FEW = 16  # handshakes that may run at once even when no file is left for further connections
PATIENCE = 0.5  # seconds that a handshake keeps its place while other connections wait for one
READ_BYTES = 64 * 2**10  # buffer of each TLS connection; asyncio's own is 256 KiB
FULL = 0.01  # seconds until places are counted again
RETRY = 1.0  # seconds until the next accept after a failed one
QUIET = 10.0  # seconds between two messages of failed accepts


@dataclass(eq=False)
class Doorway:
    """Accepts connections. Has the methods of `asyncio.Server` that uvicorn calls.

    While all places are taken, new connections stay in the socket's queue. Then a handshake older than PATIENCE seconds
    is ended, the oldest first, so that peers that send nothing do not keep others out."""

    make: Callable[[], asyncio.BaseProtocol]  # returns the protocol of a new connection
    listener: socket.socket
    context: ssl.SSLContext | None  # None without TLS
    per_turn: int  # most accepts in one turn of the event loop
    room: Callable[[], int]  # returns the number of connections for which the process has files

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._shaking: dict[asyncio.Task[None], float] = {}  # handshakes and the times of their begin, oldest first
        self._closed = False
        self._told = self._loop.time() - QUIET
        sslproto.SSLProtocol.max_size = READ_BYTES
        self.listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more connections. End all handshakes."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self.listener)
        self.listener.close()  # as asyncio's server does: further connections are refused
        for task in self._shaking:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until all handshakes have ended."""
        await asyncio.gather(*self._shaking, return_exceptions=True)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self.listener)
        self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self.listener, self._accept)

    def _accept(self) -> None:
        places = min(HANDSHAKES, max(FEW, self.room())) - len(self._shaking)
        if places <= 0:
            oldest, began = next(iter(self._shaking.items()))
            if self._loop.time() < began + PATIENCE:
                return self._pause(FULL)
            oldest.cancel()
            del self._shaking[oldest]
        for _ in range(min(self.per_turn, max(1, places))):  # one waits, or this would not be called
            try:
                peer, _ = self.listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if self._loop.time() >= self._told + QUIET:
                    self._told = self._loop.time()
                    LOG.error("no connection can be accepted (%s): tried again each second.", error.strerror)
                return self._pause(RETRY)
            task = self._loop.create_task(self._shake(peer))
            self._shaking[task] = self._loop.time()
            task.add_done_callback(lambda ended: self._shaking.pop(ended, None))

    async def _shake(self, peer: socket.socket) -> None:
        seconds = HANDSHAKE if self.context else None
        try:
            await self._loop.connect_accepted_socket(self.make, peer, ssl=self.context, ssl_handshake_timeout=seconds)
        except (OSError, asyncio.CancelledError) as error:
            error.__traceback__ = None  # else its frames and the error form a circle that keeps the buffer
