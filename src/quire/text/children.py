"""Child processes of one kind, each with one caller at a time and kept for the next; started when they are needed.

Knows processes and pipes, not what is said through them.
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
    """As many as there are callers at once; from any thread. They end with this object, at exit, too.

    idle   wait for a caller;  busy  have one, who gives them back or ends them
    """

    def __init__(self) -> None:
        self.idle: list[Child] = []
        self.busy: set[Child] = set()
        self._closed, self._lock = False, threading.Lock()
        self._reap = weakref.finalize(self, _end_all, self.idle, self.busy)

    def take(self, *arguments: str) -> tuple[Child, bool]:
        """A child, and whether it has served before; a new one is Python with these arguments. Raises `EngineClosed`
        after `close`."""
        with self._lock:
            self._check()
            while self.idle:
                child, used = self.idle.pop(), True
                if child.poll() is None:
                    break
                _end(child)
            else:
                # -P: no module of the folder in which the server was started; a session of its own: no Ctrl-C
                child, used = subprocess.Popen(
                    [sys.executable, "-P", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    start_new_session=True, env=child_variables()), False
            self.busy.add(child)
            return child, used

    def give(self, child: Child) -> None:
        """One that has answered well is free again."""
        with self._lock:
            self.busy.discard(child)
            if not self._closed:
                return self.idle.append(child)
        _end(child)

    def end(self, child: Child) -> None:
        """One that has not is no more. Raises `EngineClosed` after `close`, which may be why."""
        self.busy.discard(child)
        _end(child)
        self._check()

    def close(self) -> None:
        """End all, and start none any more; idempotent."""
        with self._lock:
            self._closed = True
        self._reap()

    def _check(self) -> None:
        if self._closed:
            raise EngineClosed("this was closed, and its processes have ended: nothing more can be asked of it.")


def _end(child: Child) -> None:
    child.kill()
    with suppress(OSError):  # what was never sent
        child.communicate()


def _end_all(idle: list[Child], busy: set[Child]) -> None:
    for child in list(busy):  # whoever reads from it sees to the rest
        child.kill()
    while idle:
        _end(idle.pop())
