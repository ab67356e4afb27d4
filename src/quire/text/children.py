"""Pool of child processes of one kind. A child serves one caller at a time, and is kept for the next.

Children are started on demand. Knows processes and pipes, not the data in them.
"""

import subprocess
import sys
import threading
import weakref
from contextlib import suppress

from quire.config.env import child_variables
from quire.contracts.errors import EngineClosed

Child = subprocess.Popen[bytes]


class Children:
    """A pool of child processes, one for each caller at a time. Any thread may use the pool.

    The children end with this object, and when this process exits.
    idle   children that no caller uses
    busy   children that a caller has taken; the caller must `give` each back or `end` it
    """

    def __init__(self) -> None:
        self.idle: list[Child] = []
        self.busy: set[Child] = set()
        self._closed, self._lock = False, threading.Lock()
        self._reap = weakref.finalize(self, _end_all, self.idle, self.busy)

    def take(self, *arguments: str) -> tuple[Child, bool]:
        """Return (child, used): an idle child, or a new Python process with these arguments.
        `used`: True for a child that has served a caller before. Raises `EngineClosed` after `close`."""
        with self._lock:
            self._check()
            while self.idle:
                child, used = self.idle.pop(), True
                if child.poll() is None:
                    break
                _end(child)
            else:
                # -P: no modules from the working directory. Its own session: Ctrl-C does not reach it.
                child, used = subprocess.Popen(
                    [sys.executable, "-P", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    start_new_session=True, env=child_variables()), False
            self.busy.add(child)
            return child, used

    def give(self, child: Child) -> None:
        """Return a child to the pool after it has answered completely, so that the next caller can take it."""
        with self._lock:
            self.busy.discard(child)
            if not self._closed:
                return self.idle.append(child)
        _end(child)

    def end(self, child: Child) -> None:
        """Kill a child that failed or was too slow. Raises `EngineClosed` if `close` was called, and so killed it."""
        self.busy.discard(child)
        _end(child)
        self._check()

    def close(self) -> None:
        """Kill all children, and start no more; idempotent."""
        with self._lock:
            self._closed = True
        self._reap()

    def _check(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed and its child processes have ended: make a new engine.")


def _end(child: Child) -> None:
    child.kill()
    with suppress(OSError):  # data that was not sent yet
        child.communicate()


def _end_all(idle: list[Child], busy: set[Child]) -> None:
    for child in list(busy):  # its caller notices, and calls `end`
        child.kill()
    while idle:
        _end(idle.pop())
