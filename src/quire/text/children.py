"""Pool of child processes of one kind. A child serves one caller at a time, and is kept for the next.

Children are started on demand. A caller sends a job and gets an answer. Each is a frame: its length in 8 bytes, then
its bytes. Knows processes, pipes and frames, not the data in them.
"""

import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

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
                child, used = (
                    subprocess.Popen(
                        [sys.executable, "-P", *arguments],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        start_new_session=True,
                        env=child_variables(),
                    ),
                    False,
                )
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


@contextmanager
def limited(child: Child, seconds: float) -> Iterator[None]:
    """`with` block at whose time limit the child is killed. The kill may come just after the block has ended."""
    timer = threading.Timer(seconds, child.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def ask(child: Child, job: bytes, most: int = sys.maxsize) -> bytes:
    """Send a job and return the answer, of at most `most` bytes; b"" if the answer is not complete."""
    assert child.stdin is not None and child.stdout is not None
    with suppress(OSError, ValueError):
        send(child.stdin, job)
        return receive(child.stdout, most)
    return b""


def send(pipe: IO[bytes], data: bytes) -> None:
    """Write a frame."""
    pipe.write(len(data).to_bytes(8) + data)
    pipe.flush()


def receive(pipe: IO[bytes], most: int = sys.maxsize) -> bytes:
    """Read a frame; b"" at the end of the pipe, and for a frame that is cut off or has more than `most` bytes."""
    size = int.from_bytes(pipe.read(8))
    return data if len(data := pipe.read(min(size, most))) == size else b""


def limit_memory(more: int) -> None:
    """Limit the address space of this process to its present size and `more` bytes."""
    used = 0
    with suppress(OSError):  # macOS has no /proc
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit_resources({resource.RLIMIT_AS: used + more if used else resource.RLIM_INFINITY})


def limit_resources(limits: Mapping[int, int]) -> None:
    """Limit the resources of this process, such as `resource.RLIMIT_AS`. It writes no files and no core dump."""
    for kind, limit in {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0, **limits}.items():
        with suppress(ValueError, OSError):  # macOS has no limit of memory
            resource.setrlimit(kind, (limit, limit))


def _end(child: Child) -> None:
    child.kill()
    with suppress(OSError):  # data that was not sent yet
        child.communicate()


def _end_all(idle: list[Child], busy: set[Child]) -> None:
    for child in list(busy):  # its caller notices, and calls `end`
        child.kill()
    while idle:
        _end(idle.pop())
