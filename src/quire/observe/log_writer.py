"""Standard error of a server, written by a thread: a reader that stops or goes, or a full disk, stops no request.

Lines wait in a queue. Lines that find no room there, or that cannot be written, are dropped and counted, and a line in
their place says so once others are written again. Lines of a process keep their order. Processes that share a pipe
write whole lines, PIPE_BUF bytes at most, so that lines do not mix. A file has no reader to wait for, and is written at
once.
"""

import io
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TextIO

PIPE_BUF = 4096  # bytes of a write that the kernel does not divide
MOST_PENDING = 1 << 20  # bytes that wait to be written
DRAIN_SECONDS = 1.0  # to write what is left at the end


class LogWriter(io.TextIOBase):
    """A text stream whose `write` never waits.

    stream   a file of the system, to which a thread writes
    told     returns the line about a number of lines that are lost
    most     bytes that may wait
    """

    def __init__(self, stream: TextIO, told: Callable[[int], str], most: int = MOST_PENDING) -> None:
        self._stream, self._told, self._most = stream, told, most
        self._lock = threading.RLock()  # a handler of a signal may write in the middle of a write
        self._queue = SimpleQueue[tuple[bytes, int]]()  # bytes, and the lines that are lost with them
        self._partial = ""  # a line that has not ended
        self._put = self._done = 0  # bytes, of all time
        self._lost = 0  # lines that nobody has been told of
        self._at_once = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
        if not self._at_once:
            threading.Thread(target=self._work, name="quire-log", daemon=True).start()

    def write(self, text: str) -> int:
        """Queue a text. The thread gets whole lines."""
        with self._lock:
            self._partial += text
            if "\n" in text:
                self._send()
        return len(text)

    def flush(self) -> None:
        """Give the thread a line that has not ended, too. This does not wait."""
        with self._lock:
            self._send()

    def isatty(self) -> bool:
        """Return True if the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the stream."""
        return self._stream.fileno()

    def drain(self, seconds: float = DRAIN_SECONDS) -> None:
        """Wait until all is written, at most so long."""
        self.flush()
        deadline = time.monotonic() + seconds
        while self._done < self._put and time.monotonic() < deadline:
            time.sleep(0.001)

    def _send(self) -> None:
        """Write or queue what is there, or drop it. The caller holds the lock."""
        data, self._partial = self._partial.encode(errors="replace"), ""
        lines = data.count(b"\n")
        if self._at_once:
            told = f"{self._told(self._lost)}\n".encode() if self._lost else b""
            self._lost = 0 if self._written(told + data) else self._lost + lines
        elif self._put - self._done + len(data) > self._most:
            self._lost += lines
        elif data:
            if self._lost:
                self._queue_up(f"{self._told(self._lost)}\n".encode(), self._lost)
                self._lost = 0
            self._queue_up(data, lines)

    def _queue_up(self, data: bytes, lines: int) -> None:
        self._put += len(data)
        self._queue.put((data, lines))

    def _work(self) -> None:
        data, lines = self._queue.get()
        while True:
            size, number = len(data), lines
            batch = [data]
            data = b""
            while not self._queue.empty():
                data, lines = self._queue.get()
                if size + len(data) > PIPE_BUF:
                    break
                size, number = size + len(data), number + lines
                batch.append(data)
                data = b""
            if not self._written(b"".join(batch)):
                with self._lock:
                    self._lost += number
            self._done += size
            if not data:
                data, lines = self._queue.get()

    def _written(self, data: bytes) -> bool:
        """Write to the stream. Return False if its reader is gone, or its disk is full."""
        left = memoryview(data)
        try:
            number = self._stream.fileno()
            while left:
                try:
                    left = left[os.write(number, left) :]
                except BlockingIOError:  # another process has made the pipe so
                    select.select([], [number], [])
        except (OSError, ValueError):  # ValueError: the stream is closed
            return False
        return True


@contextmanager
def log_written_apart(told: Callable[[int], str]) -> Iterator[None]:
    """`with` block in which `sys.stderr` is a `LogWriter`, if it is a file. The end of the block writes the rest."""
    before = sys.stderr
    try:
        before.fileno()
    except (AttributeError, OSError, ValueError):  # closed, or a test's
        yield
        return
    sys.stderr = LogWriter(before, told)
    try:
        yield
    finally:
        drain_log()
        sys.stderr = before


def drain_log() -> None:
    """Write what is left of the log of this process, before it ends without cleaning up."""
    if isinstance(sys.stderr, LogWriter):
        sys.stderr.drain()
    else:
        sys.stderr.flush()
