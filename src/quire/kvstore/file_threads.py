"""Threads that read and write files, and survive a disk that hangs.

A thread that hangs in a call to the disk is not given other work. Work that has begun cannot be taken back, because it
may still write into memory; work that has not begun is taken by the next thread that is free.
"""

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

Lost = tuple[int, ...]  # indices of the blocks of a job that were not copied
HANG_SECONDS = 10.0  # a piece of work, one block, that takes longer hangs


class FileThreads:
    """Threads that take pieces of work from one queue, until this object is gone.

    They do not keep the process from ending, as the threads of an executor would: their disk may hang for ever.
    """

    def __init__(self, name: str, count: int = 1) -> None:
        self._queue: SimpleQueue[_Piece | None] = SimpleQueue()
        self._since: dict[int, float] = {}  # number of a thread that works -> time when its piece began
        for number in range(count):
            given = (self._queue, self._since, number)
            threading.Thread(target=_work, args=given, name=name, daemon=True).start()
        self._count = count
        weakref.finalize(self, _end, self._queue, count)

    def submit(self, work: Callable[[], Lost]) -> Future[Lost]:
        """Queue work. Return the future of its result; `cancel` takes back work that has not begun."""
        future = Future[Lost]()
        self._queue.put((future, work))
        return future

    def hang(self) -> bool:
        """True when every thread has been at its piece of work for more than HANG_SECONDS."""
        since = list(self._since.values())
        return len(since) == self._count and time.monotonic() - max(since) > HANG_SECONDS


_Piece = tuple[Future[Lost], Callable[[], Lost]]


def _work(queue: "SimpleQueue[_Piece | None]", since: dict[int, float], number: int) -> None:
    while (piece := queue.get()) is not None:
        future, work = piece
        if future.set_running_or_notify_cancel():
            since[number] = time.monotonic()
            try:
                result = work()
            except BaseException as fault:  # whoever waits is told
                since.pop(number)
                future.set_exception(fault)
            else:
                since.pop(number)
                future.set_result(result)
                del result
        del piece, future, work  # a thread that waits keeps nothing


def _end(queue: "SimpleQueue[_Piece | None]", count: int) -> None:
    for _ in range(count):
        queue.put(None)
