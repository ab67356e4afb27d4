"""A listener for other engines, and its connections: each has a thread. Strangers give way to those that come later.

A stranger is a connection that has not proved the cluster's key. Knows connections; nothing of blocks.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Generic, Protocol, TypeVar

from quire.contracts.errors import ConfigError
from quire.procs.host_link import NotMaster, welcome

LOG = logging.getLogger("quire").getChild("kv")
MOST_LINES = 128  # connections at a time
BROKEN = (OSError, NotMaster, ValueError)  # errors of a connection; a ValueError is a message that cannot be read


class ServedLine(Protocol):
    """A connection."""

    def end(self) -> None:
        """End the connection for the thread that waits for a message, which closes it."""

    def close(self) -> None:
        """End the connection, and close the socket."""


L = TypeVar("L", bound=ServedLine)


def listener_at(place: tuple[str, int]) -> socket.socket:
    """Return a socket that listens where other engines read blocks. Raises ConfigError when none can."""
    try:
        return socket.create_server(place, family=socket.AF_INET6 if ":" in place[0] else socket.AF_INET)
    except OSError as error:
        raise ConfigError(
            f"kv_share={place[0]}:{place[1]}: this host cannot listen there: {error.strerror}. Give "
            "an address of this host and a free port."
        ) from None


class ShareServer(Generic[L]):
    """Serves other engines until `close`.

    listener    listens for them
    lines       connections that have proved the key
    strangers   those that have not, the oldest first
    closed      True after `close`
    """

    def __init__(
        self,
        place: tuple[str, int],
        key: bytes,
        line: Callable[[socket.socket], L],
        serve: Callable[[L, bytes], None],
    ) -> None:
        """Listen, but take no connection before `start`.

        place   host and port to listen on;  key  that the others must know
        line    makes a connection from its socket
        serve   serves a connection to its end, by its hello. An error in `BROKEN` ends it
        """
        self.listener, self.closed = listener_at(place), False
        self.lines, self.strangers = set[L](), dict[socket.socket, None]()
        self._key, self._line, self._serve = key, line, serve
        self._lock = threading.Lock()  # guards lines and strangers

    def start(self) -> None:
        """Take connections, in a thread."""
        threading.Thread(target=self._accept, name="quire-kv-share", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self.closed = True
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        with self._lock:
            for line in self.lines:
                line.end()
            for stranger in self.strangers:
                shut(stranger)

    def _accept(self) -> None:
        while not self.closed:
            try:
                end, _ = self.listener.accept()
            except OSError:  # too many open files, or closed
                time.sleep(0.05)
                continue
            serving = threading.Thread(target=self._meet, args=(end,), name="quire-kv-line", daemon=True)
            if self._has_room(end):
                try:
                    serving.start()
                    continue
                except RuntimeError as error:  # too many threads
                    LOG.warning("a connection to the share is closed: %s", error)
                    with self._lock:
                        self.strangers.pop(end, None)
            end.close()

    def _has_room(self, end: socket.socket) -> bool:
        """Take in a new connection, in the place of the oldest stranger if there are too many."""
        with self._lock:
            if len(self.lines) + len(self.strangers) >= MOST_LINES:
                oldest = next(iter(self.strangers), None)
                if oldest is None:
                    return False
                del self.strangers[oldest]
                shut(oldest)  # for the thread that waits for its proof, which closes it
            self.strangers[end] = None
        return True

    def _meet(self, end: socket.socket) -> None:
        """Serve a connection to its end."""
        with closing(end), suppress(*BROKEN):
            try:
                hello = welcome(end, self._key)
                line = self._line(end)
                with self._lock:
                    if end not in self.strangers:  # ended meanwhile
                        return
                    del self.strangers[end]
                    self.lines.add(line)
                try:
                    self._serve(line, hello)
                finally:
                    with self._lock:
                        self.lines.discard(line)
                    line.close()
            finally:
                with self._lock:
                    self.strangers.pop(end, None)


def shut(end: socket.socket) -> None:
    """End a connection for the thread that waits for it."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
