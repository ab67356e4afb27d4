"""The backends of a router, which come and go: those of the flags, of a file and of DNS together.

    named by a source --> checked again and again --> named by none: gone, ends what it has --> left out

A backend that is named again before it has ended comes back as it was. Everybody else holds the list `backends` itself,
which changes in place. Knows nothing of where names come from.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from quire.contracts.errors import ConfigError
from quire.router.addresses import MOST_MEMBERS, Member
from quire.router.backends import Backend, check, watch
from quire.router.breaker import Circuit
from quire.router.events import follow
from quire.router.settings import EXACT, RouterConfig
from quire.router.state import RouterState

LOG = logging.getLogger("quire")
FLAGS = "--backend"
SWEEP_SECONDS = 0.2  # between two looks whether a backend that is gone has ended its requests


class Fleet:
    """The backends. `own` answer requests, `prefills` compute prompts for these, `backends` are all.

    fell      called with a backend that went down or is left out
    changed   called when backends came or went, or an operator drained one
    """

    def __init__(self, config: RouterConfig, state: RouterState) -> None:
        self._config, self._state = config, state
        self.backends: list[Backend] = []
        self.own: list[Backend] = []
        self.prefills: list[Backend] = []
        self.fell: Callable[[Backend], None] = lambda backend: None
        self.changed: Callable[[], None] = lambda: None
        self._named: dict[str, Sequence[Member]] = {}
        self._tasks: dict[Backend, list[asyncio.Task[None]]] = {}
        self._started = False
        for member in config.prefill_backend:
            self._add(member, self.prefills)
        self.update(FLAGS, config.backend)

    def update(self, source: str, found: Sequence[Member]) -> None:
        """Take what a source names now. Raises `ConfigError` for what cannot be; then nothing changes."""
        named = self._named | {source: found}
        wanted = {one.address.url: one for each in reversed(named.values()) for one in each}  # the first source wins
        self._check(wanted)
        self._named = named
        before = {backend.name: backend for backend in self.own}
        came = [self._add(one, self.own) for url, one in wanted.items() if url not in before]
        changed = bool(came)
        for url, backend in before.items():
            one = wanted.get(url)
            if one is not None:
                backend.weight = one.weight
            if backend.gone != (one is None):
                backend.gone, changed = one is None, True
                LOG.info("backend %s is %s", url, "gone: it gets no new requests" if backend.gone else "named again")
                if backend.gone:
                    self._sweep_later(backend)
        if changed and self._started:
            for backend in came:
                LOG.info("backend %s is new", backend.name)
            self.changed()

    def set_draining(self, backend: Backend, draining: bool) -> str:
        """Drain a backend, or no more. Return the reason why a restart would forget that, or ""."""
        backend.draining = draining
        drained = {one.name for one in self.backends if one.draining}
        absent = self._state.draining - {one.name for one in self.backends}
        reason = self._state.keep(drained | absent)
        LOG.info("backend %s %s", backend.name, "is drained by an operator" if draining else "is drained no more")
        self.changed()
        return reason

    async def look(self, *some: Backend) -> list[str]:
        """Check these backends now, or all of them. Return the reason why each is not healthy, or ""."""
        looked = some or tuple(self.backends)
        faults = await asyncio.gather(*(check(backend, self._config) for backend in looked))
        for backend, fault in zip(looked, faults, strict=True):
            backend.checked(fault)
        return faults

    async def start(self) -> None:
        """Check every backend once, and from now on again and again; follow their KV events."""
        for backend, fault in zip(self.backends, await self.look(), strict=True):
            if fault:
                LOG.warning("backend %s is down: %s", backend.name, fault)
        self._started = True
        for backend in self.backends:
            self._watch(backend)

    async def close(self) -> None:
        """End the checks and the connections."""
        tasks = [task for each in self._tasks.values() for task in each]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for backend in self.backends:
            backend.pool.close()

    def _check(self, wanted: Mapping[str, Member]) -> None:
        if len(wanted) > MOST_MEMBERS:
            raise ConfigError(f"all sources name {len(wanted):,} backends: a router takes {MOST_MEMBERS:,}.")
        if both := wanted.keys() & {backend.name for backend in self.prefills}:
            raise ConfigError(f"{min(both)} is in --prefill-backend, too: a server has one of the two parts.")
        exact = self._config.choice.policy == EXACT
        lacking = [url for url, one in wanted.items() if exact and not one.kv_events[0]]
        if lacking:
            raise ConfigError(f"--policy exact needs kv_events of each backend, and {lacking[0]} has none: name them.")

    def _add(self, member: Member, part: list[Backend]) -> Backend:
        taken = {backend.number for backend in self.backends}
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        backend = Backend(number, member, self._config)
        backend.draining = backend.name in self._state.draining
        backend.fell = lambda one: self.fell(one)
        backend.breaker.may_open = self._may_open
        part.append(backend)
        self.backends.append(backend)
        if self._started:
            self._watch(backend)
            backend.doubted.set()  # checked at once
        return backend

    def _watch(self, backend: Backend) -> None:
        tasks = [asyncio.create_task(watch(backend, self._config))]
        if backend.index is not None:
            tasks.append(asyncio.create_task(follow(backend.index, *backend.kv_events)))
        self._tasks[backend] = tasks

    def _may_open(self) -> bool:
        """Circuits are open on at most half of the backends: else requests that no backend can answer stopped all."""
        num_open = sum(backend.breaker.state is not Circuit.CLOSED for backend in self.own)
        return 2 * (num_open + 1) <= len(self.own)

    def _sweep_later(self, backend: Backend) -> None:
        if self._started:
            self._tasks[backend].append(asyncio.create_task(self._sweep(backend)))

    async def _sweep(self, backend: Backend) -> None:
        """Leave a backend out when it has ended its requests, unless it is named again before."""
        while backend.gone and backend.in_flight:
            await asyncio.sleep(SWEEP_SECONDS)
        if backend.gone and backend in self._tasks:
            self.own.remove(backend)
            self.backends.remove(backend)
            for task in self._tasks.pop(backend):
                if task is not asyncio.current_task():
                    task.cancel()
            self.fell(backend)
            backend.pool.close()
            LOG.info("backend %s is left out", backend.name)
            self.changed()
