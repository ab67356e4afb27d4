"""Work on the texts of requests: at once on the event loop, or in threads, whose time clients share in turn.

    size of the request    where                        at once, of one client
    below LONG             on the event loop
    from LONG on           in a thread                  4, 3
    from HUGE on           in a thread, one child each  2, 1

A client is an API key, or the address where there is none. Those that wait get free threads in turn, so that many long
texts of one client hold up no other. The texts that wait have at most MOST_WAITING bytes, those of one client half.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from quire.contracts.errors import QueueFull
from quire.contracts.step import F32

# Time grows with the bytes of a request: characters, messages (some 18 us each), parts, variables of the template.
LONG = 8_192  # bytes of a request; from here on its texts take 1 to 5 ms, and are processed in a thread
HUGE = 2**20  # bytes; from here on encoding takes hundreds of megabytes for a while (7 MB: 1 GB)
MOST_WAITING = 128 * 2**20  # bytes of requests
T = TypeVar("T")


class TextWork:
    """Threads for the texts of long requests."""

    def __init__(self) -> None:
        self._long, self._huge = FairThreads("quire-text", 4, 3), FairThreads("quire-long-text", 2, 1)

    async def run(self, client: str, size: int, work: Callable[[], T]) -> T:
        """Run `work` for a request of `size` bytes, and return its result. Raises `QueueFull` when too much waits."""
        if size < LONG:
            return work()
        return await (self._long if size < HUGE else self._huge).run(client, size, work)

    async def write(self, client: str, vectors: Sequence[F32], work: Callable[[], T]) -> T:
        """Run `work`, which writes an answer of vectors, and return its result. It is never refused."""
        return work() if sum(vector.nbytes for vector in vectors) < LONG else await self._long.run(client, 0, work)


class FairThreads:
    """Threads that clients use in turn.

    threads   works that run at once
    each      works of one client that run at once
    """

    def __init__(self, name: str, threads: int, each: int) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._free, self._each = threads, each
        self._running = Counter[str]()
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}  # in the order of their turns
        self._bytes = Counter[str]()  # that wait, by client

    async def run(self, client: str, size: int, work: Callable[[], T]) -> T:
        """Run `work` in a thread when it is the client's turn. A work goes on when its caller is cancelled, and counts
        until it ends. Raises `QueueFull` when too many bytes of this client, or of all, wait."""
        if self._free and self._running[client] < self._each:
            self._take(client)
        else:
            await self._wait(client, size)
        loop = asyncio.get_running_loop()
        job: Future[T] = self._pool.submit(work)
        job.add_done_callback(lambda _: _call(loop, lambda: self._give(client)))
        return await asyncio.shield(asyncio.wrap_future(job))

    async def _wait(self, client: str, size: int) -> None:
        own = self._bytes[client] + size
        if own > MOST_WAITING // 2 or self._bytes.total() + size > MOST_WAITING:
            raise QueueFull("too many long texts wait to be read: try again in a moment, or send shorter ones.")
        entry = (asyncio.get_running_loop().create_future(), size)
        self._bytes[client] = own
        self._waiting.setdefault(client, deque()).append(entry)
        try:
            await entry[0]
        except asyncio.CancelledError:
            if entry[0].done() and not entry[0].cancelled():  # its turn came as it left
                self._give(client)
            else:
                self._forget(client, entry)
            raise

    def _take(self, client: str) -> None:
        self._free -= 1
        self._running[client] += 1

    def _give(self, client: str) -> None:
        """End a work of a client, and begin those whose turn it is."""
        self._free += 1
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        while self._free and (following := self._next()) is not None:
            entry = self._waiting[following][0]
            self._forget(following, entry)
            if (others := self._waiting.pop(following, None)) is not None:
                self._waiting[following] = others  # behind the other clients
            if not entry[0].done():
                self._take(following)
                entry[0].set_result(None)

    def _next(self) -> str | None:
        return next((client for client in self._waiting if self._running[client] < self._each), None)

    def _forget(self, client: str, entry: tuple[asyncio.Future[None], int]) -> None:
        queue = self._waiting[client]
        queue.remove(entry)
        self._bytes[client] -= entry[1]
        if not queue:
            del self._waiting[client], self._bytes[client]


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Call a function on the event loop, from another thread; not at all once the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function)
