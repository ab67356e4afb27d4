"""Backends: their health, and the load that this router has put on them.

    down --check answers 200--> up --`FAILURES` checks fail, or a connection is refused--> down
    a drained backend gets no new requests, nor does one that drains itself or that is no longer named; those that it
    has go on
    one that is up and fails requests is left alone for a while (`breaker.py`)

Knows nothing of policies and of the content of requests.
"""

import asyncio
import logging
import random
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from quire.config.env import BACKEND_KEY
from quire.router.addresses import Member
from quire.router.breaker import Breaker, Circuit
from quire.router.events import KVIndex
from quire.router.rendezvous import hash_of
from quire.router.settings import COSTED, RouterConfig
from quire.router.upstream import Pool, UpstreamError

LOG = logging.getLogger("quire")
RESIDENT = re.compile(r'^\w+:adapter_requests\{[^}]*?\badapter="((?:[^"\\]|\\.)*)"', re.MULTILINE)
FAILURES = 2  # checks in a row that must fail: one may be late on a busy machine
LEAST_PAUSE = 0.25  # seconds between two checks of a backend: full ones are in doubt with every request


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

    number      place in the table of prefixes; no other backend of now has it
    weight      its share of the requests, beside the weights of others
    seed        hash of its URL
    index       its KV blocks, if it sends KV events
    gone        no source names it any longer
    in_flight   requests that it answers now
    active      tokens of the prompts of these
    waiting     tokens of prompts that it must compute before their answers begin
    draining    an operator of this router drains it
    ending      it drains itself, as its answer to the health check says
    fell        called when it goes down
    chosen      number of the choice that it had last
    turn        grows with every choice in turn, by less with a larger weight; the smallest is the next one
    resident    names of the adapters on its device, as far as it has told
    tells       False: it has refused to tell, so that it is not asked until it comes up again
    """

    def __init__(self, number: int, member: Member, config: RouterConfig) -> None:
        self.number, self.name, self.weight = number, member.address.url, member.weight
        self.seed, self.kv_events = hash_of(self.name.encode()), member.kv_events
        self.pool = Pool(member.address, config.faults.connect_timeout)
        self.breaker = Breaker(config.faults.breaker_failures, config.faults.breaker_seconds)
        self.index = KVIndex() if member.kv_events[0] else None
        self.up = self.draining = self.ending = self.gone = False
        self.reason = "not checked yet"
        self.in_flight = self.active = self.waiting = self.chosen = 0
        self.turn = 0.0
        self.resident, self.tells = frozenset[str](), True
        self.doubted = asyncio.Event()
        self.fell: Callable[[Backend], None] = lambda backend: None
        self._failures = 0

    @property
    def usable(self) -> bool:
        """True when new requests may go here."""
        return self.readable and not self.leaves

    @property
    def readable(self) -> bool:
        """True when requests may go here for what it alone has stored: also while it is drained."""
        return self.up and self.breaker.allows

    @property
    def leaves(self) -> bool:
        """True while it is drained, by an operator or by itself, or has been taken out."""
        return self.draining or self.ending or self.gone

    def failed(self, error: UpstreamError) -> None:
        """Record a failed request: the backend is checked at once. One that takes no connection is down until then."""
        self.doubted.set()
        if error.reason == "connect":
            self._failures = FAILURES
            self._judge(str(error))

    def checked(self, fault: str) -> None:
        """Record a health check; `fault` is "" for a good one. One fault is enough while it gets no requests: an
        operator waits for the end of a restart."""
        self._failures = self._failures + 1 if fault else 0
        if not fault or self._failures >= FAILURES or not self.up or self.leaves:
            self._judge(fault)

    def described(self) -> dict[str, Any]:
        """Return its state for the operators' list."""
        return {
            "backend": self.name,
            "weight": self.weight,
            "up": self.up,
            "draining": self.leaves,
            "gone": self.gone,
            "circuit": self.breaker.state.name.lower(),
            "in_flight": self.in_flight,
            "reason": self.reason,
        }

    def _judge(self, fault: str) -> None:
        before, self.up, self.reason = self.up, not fault, fault
        if self.up != before:
            if self.up:
                LOG.info("backend %s is up", self.name)
                self.breaker.close()  # it may be a new process
                self.tells = True
            else:
                LOG.warning("backend %s is down: %s", self.name, fault)
                self.fell(self)
                self.pool.close()

    def judged(self, trial: bool, ok: bool | None) -> None:
        """Take the end of a request for the circuit: see `Breaker.end`."""
        before = self.breaker.state
        self.breaker.end(trial, ok)
        if (now := self.breaker.state) is not before and now is not Circuit.HALF_OPEN:
            words, level = "is closed", logging.INFO
            if now is Circuit.OPEN:
                words, level = f"is open: no requests for {self.breaker.wait:g} s", logging.WARNING
            LOG.log(level, "backend %s: the circuit %s", self.name, words)


async def watch(backend: Backend, config: RouterConfig) -> None:
    """Check a backend again and again, at once when it is in doubt."""
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(config.health.health_interval * random.uniform(0.9, 1.1)):
                await backend.doubted.wait()
        backend.doubted.clear()
        backend.checked(await check(backend, config))
        if backend.up and backend.tells and config.choice.policy in COSTED:
            backend.resident = await residents(backend, config)
        await asyncio.sleep(min(LEAST_PAUSE, config.health.health_interval))


async def check(backend: Backend, config: RouterConfig) -> str:
    """Ask a backend for its health. Return "" or the reason why it is not healthy."""
    path = config.health.health_path
    try:
        status, body = await backend.pool.fetch(
            b"GET", path.encode(), config.health.headers, b"", config.faults.connect_timeout
        )
    except UpstreamError as error:
        if error.reason == "timeout":
            backend.doubted.set()  # it may hang: requests go there until a second check has failed
        return str(error)
    if status != 200:
        return f"{path} answers {status}"
    told = _told(body).status
    ending = told == "draining"
    if ending != backend.ending:
        backend.ending = ending
        LOG.info("backend %s %s", backend.name, "drains: it gets no new requests" if ending else "drains no more")
    return "its engine hangs" if told == "hung" else ""  # its process answers 200, since it is alive


async def residents(backend: Backend, config: RouterConfig) -> frozenset[str]:
    """Return the names of the adapters on a backend's device, from its metrics; none if it does not tell."""
    headers, timeout = config.health.headers, config.faults.connect_timeout
    try:
        status, body = await backend.pool.fetch(b"GET", b"/metrics", headers, b"", timeout)
    except UpstreamError:
        return frozenset()
    if status in (401, 403):
        backend.tells = False
        LOG.warning(
            "backend %s answers /metrics with %d, and is not asked again: the router does not know which adapters it "
            "has loaded. Give the router a key for its backends: %s, or --backend-api-key.",
            backend.name,
            status,
            BACKEND_KEY,
        )
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
