"""Backends: their health, and the load that this router has put on them.

    down --check answers 200--> up --`FAILURES` checks fail, or a connection is refused--> down
    a drained backend gets no new requests, nor does one that drains itself; those that it has go on

Knows nothing of policies and of the content of requests.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from quire.router.settings import COSTED, Address, RouterConfig
from quire.router.upstream import Pool, UpstreamError

LOG = logging.getLogger("quire")
RESIDENT = re.compile(r'^\w+:adapter_requests\{[^}]*?\badapter="((?:[^"\\]|\\.)*)"', re.MULTILINE)
FAILURES = 2  # checks in a row that must fail: one may be late on a busy machine


class Load:
    """`with` block of a request on a backend. Its prompt has `total` tokens, of which the backend has `cached`."""

    def __init__(self, backend: "Backend", total: int, cached: int) -> None:
        self._backend, self._total, self._waiting = backend, total, max(0, total - cached)

    def __enter__(self) -> "Load":
        self._backend.in_flight += 1
        self._backend.active += self._total
        self._backend.waiting += self._waiting
        return self

    def begun(self) -> None:
        """Count the prompt as computed: the answer has begun. Idempotent."""
        self._backend.waiting -= self._waiting
        self._waiting = 0

    def __exit__(self, *error: object) -> None:
        self.begun()
        self._backend.in_flight -= 1
        self._backend.active -= self._total


class Backend:
    """A server that answers requests.

    number      place among all backends, those for prefill after the others
    in_flight   requests that it answers now
    active      tokens of the prompts of these
    waiting     tokens of prompts that it must compute before their answers begin
    draining    an operator of this router drains it
    ending      it drains itself, as its answer to the health check says
    fell        called when it goes down
    turn        grows with every choice; the backend with the smallest was chosen longest ago
    resident    names of the adapters on its device, as far as it has told
    """

    def __init__(self, number: int, address: Address, config: RouterConfig) -> None:
        self.number, self.name = number, address.url
        self.pool = Pool(address, config.connect_timeout)
        self.up = self.draining = self.ending = False
        self.reason = "not checked yet"
        self.in_flight = self.active = self.waiting = self.turn = 0
        self.resident = frozenset[str]()
        self.doubted = asyncio.Event()
        self.fell: Callable[[Backend], None] = lambda backend: None
        self._failures = 0

    @property
    def usable(self) -> bool:
        """True when new requests may go here."""
        return self.up and not self.leaves

    @property
    def leaves(self) -> bool:
        """True while it is drained, by an operator or by itself."""
        return self.draining or self.ending

    def failed(self, error: UpstreamError) -> None:
        """Record a failed request: the backend is checked at once. One that takes no connection is down until then."""
        self.doubted.set()
        if error.reason == "connect":
            self._failures = FAILURES
            self._judge(str(error))

    def checked(self, fault: str) -> None:
        """Record a health check; `fault` is "" for a good one."""
        self._failures = self._failures + 1 if fault else 0
        if not fault or self._failures >= FAILURES or not self.up:
            self._judge(fault)

    def described(self) -> dict[str, Any]:
        """Return its state for the operators' list."""
        return {
            "backend": self.name,
            "up": self.up,
            "draining": self.leaves,
            "in_flight": self.in_flight,
            "reason": self.reason,
        }

    def _judge(self, fault: str) -> None:
        before, self.up, self.reason = self.up, not fault, fault
        if self.up != before:
            LOG.warning("backend %s is %s", self.name, "up" if self.up else f"down: {fault}")
            if not self.up:
                self.fell(self)
                self.pool.close()


async def watch(backend: Backend, config: RouterConfig) -> None:
    """Check a backend again and again, at once when it is in doubt."""
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(config.health_interval):
                await backend.doubted.wait()
        backend.doubted.clear()
        backend.checked(await check(backend, config))
        if backend.up and config.policy in COSTED:
            backend.resident = await residents(backend, config)


async def check(backend: Backend, config: RouterConfig) -> str:
    """Ask a backend for its health. Return "" or the reason why it is not healthy."""
    path = config.health_path
    try:
        status, body = await backend.pool.fetch(b"GET", path.encode(), [], b"", config.connect_timeout)
    except UpstreamError as error:
        return str(error)
    if status != 200:
        return f"{path} answers {status}"
    ending = _told(body).status == "draining"
    if ending != backend.ending:
        backend.ending = ending
        LOG.warning("backend %s %s", backend.name, "drains: it gets no new requests" if ending else "drains no more")
    return ""


async def residents(backend: Backend, config: RouterConfig) -> frozenset[str]:
    """Return the names of the adapters on a backend's device, from its metrics; none if it does not tell."""
    try:
        status, body = await backend.pool.fetch(b"GET", b"/metrics", [], b"", config.connect_timeout)
    except UpstreamError:
        return frozenset()
    names = RESIDENT.findall(body.decode(errors="replace")) if status == 200 else ()
    return frozenset(re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], name) for name in names)


class _Told(msgspec.Struct):
    """The answer of a backend of ours to a health check."""

    status: str = ""


def _told(body: bytes) -> _Told:
    """Return what an answer tells; nothing for the answer of another server."""
    try:
        return msgspec.json.decode(body, type=_Told)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Told()
