"""Connections of a listening socket until their TLS handshake is done: few at once, each for a short time.

asyncio's own server counts no handshake, waits 60 s for each, and logs each failed accept with a traceback.
"""

import asyncio
import logging
import socket
import ssl
from asyncio import sslproto
from collections.abc import Callable

LOG = logging.getLogger("quire")
HANDSHAKE = 10.0  # seconds for a TLS handshake
HANDSHAKES = 256  # most at once
FEW = 16  # handshakes that may run at once even when no file is left for further connections
PATIENCE = 0.5  # seconds that a handshake keeps its place while other connections wait for one
READ_BYTES = 64 * 2**10  # buffer of each TLS connection; asyncio's own is 256 KiB
RETRY = 1.0  # seconds until the next accept after a failed one
QUIET = 10.0  # seconds between two messages of failed accepts


class Doorway:
    """Accepts connections. Has the methods of `asyncio.Server` that uvicorn calls.

    listening socket --> handshake (HANDSHAKES at once, HANDSHAKE seconds) --> protocol.connection_made

    While all places are taken, new connections stay in the socket's queue. Then a handshake older than PATIENCE seconds
    is ended, the oldest first, so that peers that send nothing do not keep others out.
    make      returns the protocol of a new connection
    context   of TLS; None without it
    per_turn  most accepts in one turn of the event loop
    room      returns the number of connections for which the process has files
    """

    def __init__(
        self,
        make: Callable[[], asyncio.BaseProtocol],
        listener: socket.socket,
        context: ssl.SSLContext | None,
        per_turn: int,
        room: Callable[[], int],
    ) -> None:
        self._make = make
        self._listener = listener
        self._context = context
        self._per_turn = per_turn
        self._room = room
        self._loop = asyncio.get_running_loop()
        self._shaking: dict[asyncio.Task[None], float] = {}  # handshakes and the times of their begin, oldest first
        self._retry: asyncio.TimerHandle | None = None  # while no connection is accepted
        self._closed = False
        self._told = self._loop.time() - QUIET
        sslproto.SSLProtocol.max_size = READ_BYTES
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more connections. End all handshakes."""
        self._closed = True
        self._pause(0.0)
        for task in self._shaking:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until all handshakes have ended."""
        if self._shaking:
            await asyncio.wait(self._shaking)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if not self._closed:
            self._retry = None
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        places = min(HANDSHAKES, max(FEW, self._room())) - len(self._shaking)
        if places <= 0:
            oldest, began = next(iter(self._shaking.items()))
            if (wait := began + PATIENCE - self._loop.time()) > 0:
                return self._pause(wait)
            oldest.cancel()
            del self._shaking[oldest]
        for _ in range(min(self._per_turn, max(1, places))):  # one waits, or this would not be called
            try:
                peer, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return None
            except OSError as error:
                self._tell(error)
                return self._pause(RETRY)
            task = self._loop.create_task(self._shake(peer))
            self._shaking[task] = self._loop.time()
            task.add_done_callback(self._shaken)
        return None

    async def _shake(self, peer: socket.socket) -> None:
        timeout = None if self._context is None else HANDSHAKE
        connect = self._loop.connect_accepted_socket
        try:
            await connect(self._make, peer, ssl=self._context, ssl_handshake_timeout=timeout)
        except (OSError, asyncio.CancelledError) as error:
            error.__traceback__ = None  # else its frames and the error form a circle that keeps the buffer

    def _shaken(self, task: asyncio.Task[None]) -> None:
        self._shaking.pop(task, None)
        if self._retry is not None:
            self._retry.cancel()
            self._resume()

    def _tell(self, error: OSError) -> None:
        if self._loop.time() >= self._told + QUIET:
            self._told = self._loop.time()
            LOG.error("no connection can be accepted (%s): the server tries again each second.", error.strerror)
