"""Backends: their health, and the load that this router has put on them.

    down --check answers 200--> up --`FAILURES` checks fail, or a connection is refused--> down
    a drained backend gets no new requests; those that it has go on

Knows nothing of policies and of the content of requests.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from quire.router.settings import Address, RouterConfig
from quire.router.upstream import Pool, UpstreamError, read_all

LOG = logging.getLogger("quire")
FAILURES = 2  # checks in a row that must fail: one may be late on a busy machine


class Load:
    """The load of a request on a backend, in tokens, from its choice to its end."""

    def __init__(self, backend: "Backend", total: int, cached: int) -> None:
        self._backend, self._total, self._waiting = backend, total, max(0, total - cached)
        backend.in_flight += 1
        backend.active += total
        backend.waiting += self._waiting

    def begun(self) -> None:
        """Count the prompt as computed: the answer has begun. Idempotent."""
        self._backend.waiting -= self._waiting
        self._waiting = 0

    def end(self) -> None:
        """Take the load away."""
        self.begun()
        self._backend.in_flight -= 1
        self._backend.active -= self._total


class Backend:
    """A server that answers requests.

    number      place among all backends, those for prefill after the others
    in_flight   requests that it answers now
    active      tokens of the prompts of these
    waiting     tokens of prompts that it must compute before their answers begin
    turn        grows with every choice; the backend with the smallest was chosen longest ago
    """

    def __init__(self, number: int, address: Address, config: RouterConfig) -> None:
        self.number, self.name = number, address.url
        self.pool = Pool(address, config.connect_timeout)
        self.up = self.draining = False
        self.reason = "not checked yet"
        self.in_flight = self.active = self.waiting = self.turn = 0
        self.doubted = asyncio.Event()
        self._failures = 0

    @property
    def usable(self) -> bool:
        """True when new requests may go here."""
        return self.up and not self.draining

    @contextmanager
    def load(self, total: int, cached: int) -> Iterator[Load]:
        """`with` block of a request with a prompt of `total` tokens, of which the backend has `cached`."""
        load = Load(self, total, cached)
        try:
            yield load
        finally:
            load.end()

    def refused(self, reason: str) -> None:
        """Record that no connection was possible: the backend is down until a check finds it up."""
        self._failures = FAILURES
        self.doubted.set()
        self._judge(reason)

    def checked(self, fault: str) -> None:
        """Record a health check; `fault` is "" for a good one."""
        self._failures = self._failures + 1 if fault else 0
        if not fault or self._failures >= FAILURES or not self.up:
            self._judge(fault)

    def described(self) -> dict[str, Any]:
        """Return its state for the operators' list."""
        return {"backend": self.name, "up": self.up, "draining": self.draining, "in_flight": self.in_flight,
                "reason": self.reason}

    def _judge(self, fault: str) -> None:
        before, self.up, self.reason = self.up, not fault, fault
        if self.up != before:
            LOG.warning("backend %s is %s", self.name, "up" if self.up else f"down: {fault}")


async def watch(backend: Backend, config: RouterConfig, fell: Callable[[Backend], None]) -> None:
    """Check a backend again and again, at once when it is in doubt. `fell` is called when it has gone down."""
    while True:
        before = backend.up
        backend.doubted.clear()
        backend.checked(await check(backend, config))
        if before and not backend.up:
            fell(backend)
            backend.pool.close()
        try:
            async with asyncio.timeout(config.health_interval):
                await backend.doubted.wait()
            if not backend.up:
                fell(backend)
                await asyncio.sleep(min(config.health_interval, 0.2))  # a refused connection is refused again at once
        except TimeoutError:
            pass


async def check(backend: Backend, config: RouterConfig) -> str:
    """Ask a backend for its health. Return "" or the reason why it is not healthy."""
    try:
        async with asyncio.timeout(config.connect_timeout):
            connection = await backend.pool.ask(b"GET", config.health_path.encode(), [], b"")
            try:
                await read_all(connection)
                return "" if connection.status == 200 else f"{config.health_path} answers {connection.status}"
            finally:
                backend.pool.give_back(connection)
    except TimeoutError:
        return f"{config.health_path} did not answer within {config.connect_timeout:g} s"
    except UpstreamError as error:
        return str(error)
