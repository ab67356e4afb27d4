"""Replicas of attention behind one core: each has its own requests, blocks and ranks (data parallelism).

Replicas in lock-step share the experts of a model. They take every step together, and one record (`StepSync`) says what
each computes, so that no rank decides anything by itself. Independent replicas share nothing. One core plans for all
replicas: it sees every queue, so requests are balanced by the loads of this moment.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np

from quire.contracts.adapters import NO_ADAPTERS, Adapter, AdapterStats
from quire.contracts.errors import EngineDead, InvalidParameter, QueueFull, UserError
from quire.contracts.output import (
    BY_HANDLE,
    NO_TOKENS,
    Finish,
    PrefixStats,
    StateStats,
    StepOutputs,
    StepStats,
    TierStats,
)
from quire.contracts.protocols import ExecutorFacts, Wait
from quire.contracts.request import FinishReason, NewRequest
from quire.contracts.step import Tier
from quire.engine.adapters import summed
from quire.engine.balancer import Balancer, Control
from quire.engine.core import EngineCore
from quire.engine.lockstep import agreed

LOG = logging.getLogger("quire")
FLUSH_SECONDS = 10.0  # for copies to a disk, when an engine is closed
WAIT_SECONDS = 0.005  # for a result of independent replicas that compute; then new requests are looked for
LIMITS = {"describe": 1.0}  # operation -> seconds for independent replicas to answer; one that hangs must not stop all
FULL = 0.5  # share of the KV cache in use, above which a replica's waiting requests count more
WEIGHT = 6.0  # of a waiting request when the cache is full: it may wait for long
TOTALS = ("num_preempted",)  # statistics since the start, as `prefix` and `drafts`
STATES = (
    "num_running",
    "num_waiting",
    "num_blocked",
    "num_blocks",
    "num_free_blocks",
    "num_cached_blocks",
    *TOTALS,
)  # statistics about the time after a step; the others are about the step
COUNTS = ("num_tokens", "num_prefill_tokens", "num_scheduled", "num_prefills", "schedule_s", "execute_s", "finish_s")
Advance = tuple[EngineCore, StepOutputs]  # a replica, and its outputs of a step or between two
MakeBalancer = Callable[[Control], Balancer]


class Replicas:
    """Engine cores behind the interface of one; see `EngineCore`. One thread uses them.

    lockstep   the cores take every step together
    arrived    set when a result of an executor arrives; of independent replicas
    balance    makes the balancer of experts, from a function that runs an operation on every rank
    balancer   of experts; None: they are not balanced
    torn       see `EngineCore`
    """

    def __init__(
        self,
        cores: Sequence[EngineCore],
        *,
        lockstep: bool,
        arrived: threading.Event | None = None,
        balance: MakeBalancer | None = None,
    ) -> None:
        self.cores, self.lockstep = tuple(cores), lockstep
        self._turns = list(cores)  # that live; the one that got a request least recently is the first
        self._arrived = arrived or threading.Event()
        self._homes: dict[int, EngineCore] = {}  # of the live requests, by handle
        self._ended: list[Finish] = []  # requests of replicas that died
        self._early: list[Advance] = []  # outputs between two steps; reported with the next ones
        self._died = False  # True: a replica died since the last outputs
        self.torn = False
        self._states = {core: core.state().stats for core in cores}
        self.balancer = balance(self.control) if balance is not None else None

    @property
    def facts(self) -> ExecutorFacts:
        """The facts of a replica, with the slots and blocks of all."""
        facts = [core.facts for core in self.cores]
        return msgspec.structs.replace(
            facts[0], num_slots=sum(one.num_slots for one in facts), num_blocks=sum(one.num_blocks for one in facts)
        )

    @property
    def executor(self) -> "Replicas":
        """This object: `control` and `check_alive` reach the executors of all replicas."""
        return self

    @property
    def live(self) -> list[EngineCore]:
        """The replicas that have not died, in their order."""
        return [core for core in self.cores if core in self._turns]

    @property
    def has_work(self) -> bool:
        """True when a replica has work, or a death is not reported yet."""
        return self._died or any(core.has_work for core in self._turns)

    @property
    def handles(self) -> list[int]:
        """Handles of the live requests."""
        return [handle for core in self._turns for handle in core.handles]

    def add(self, new: NewRequest, *, places: int = 1) -> None:
        """Give a request to the replica with the least load that has room, and a child to its parent's.

        See `EngineCore.add`. Requests take turns among replicas with the same load, so that none gets more than others.
        """
        self.check_alive()
        parent = self._homes.get(new.parent) if new.parent is not None else None
        refusal: QueueFull | None = None
        excess = {core: _excess(core) for core in self._turns}
        for core in [parent] if parent is not None else sorted(self._turns, key=load):
            beside = max(0, sum(excess.values()) - excess[core])  # max_waiting is the limit of all replicas together
            try:
                core.add(new, places=places, beside=beside)
            except QueueFull as error:
                refusal = refusal or error
                continue
            self._homes[new.handle] = core
            self._turns.remove(core)
            self._turns.append(core)
            return
        assert refusal is not None
        raise refusal

    def abort(self, handle: int, cause: str = "") -> None:
        """End a request in any state; unknown handles are ignored. cause: a word for the records"""
        if (core := self._homes.pop(handle, None)) is not None:
            core.abort(handle, cause)

    def step(self) -> StepOutputs:
        """Advance the replicas. A step that raises is final. See `EngineCore.step`."""
        if self.torn:
            raise EngineDead("an earlier step of this engine failed: make a new engine.")
        self.torn = True
        every = self._advance_together() if self.lockstep else self._advance_each()
        if self.balancer is not None:
            moved = [core.moved for core in self.cores]
            self.balancer.note(-1 if min(moved) < 0 else max(moved))
        self.torn = False
        outputs = self._merged(every)
        for finish in outputs.finished:
            self._homes.pop(finish.handle, None)
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix caches; running requests keep their blocks. Returns True when no request was running."""
        self.check_alive()  # requests of a dead replica do not run
        return all([core.reset_prefix_cache() for core in self._turns])

    def shutdown(self) -> None:
        """Drop the steps in flight and stop the executors: all are told before any is waited for."""
        if self.balancer is not None:
            self.balancer.close()
        for wait in (False, True):
            for core in self.cores:
                core.shutdown(wait=wait)

    def check_alive(self) -> None:
        """Raise `EngineDead` when no replica can run a step; of replicas in lock-step, when one cannot."""
        for core in self.live:
            with self._guarded(core):
                core.executor.check_alive()

    def control(self, name: str, args: dict[str, Any]) -> list[object]:
        """Run an operation on every rank of every replica; return their values. All are asked before any is waited for.

        An independent replica that dies meanwhile is left out. One that exceeds the limit of `LIMITS` for the operation
        is told in words instead of its values. Raises the first `UserError` of a replica.
        """
        self.check_alive()
        limit = None if self.lockstep else LIMITS.get(name)
        until = None if limit is None else time.monotonic() + limit
        asked: list[tuple[EngineCore, Wait]] = []
        values, refusals = list[object](), list[UserError]()
        for core in self.live:
            with self._guarded(core):
                settled = self._settle(core, until)
                asked.append((core, core.executor.ask(name, args) if settled else _nobody))
        for core, wait in asked:
            with self._guarded(core):
                try:
                    value = wait(None if until is None else max(0.0, until - time.monotonic()))
                except UserError as refusal:
                    refusals.append(refusal)
                    continue
                except TimeoutError as silent:
                    names = f" ({silent})" * bool(str(silent))
                    value = {
                        "silent": f"replica {self.cores.index(core)}{names} has not answered in {limit:g} s: it "
                        "computes a long step, or hangs."
                    }
                values += value if isinstance(value, list) else [value]
        if refusals:
            raise refusals[0]
        return values

    def _settle(self, core: EngineCore, until: float | None) -> bool:
        """Send the masks that a step of an independent replica waits for, so that every submitted step is complete.

        until   time until which the step before may run (None: for ever). Returns False when it runs on
        """
        if not core.needs_masks:
            return True
        while until is not None and len(core.in_flight) > 1 and not core.executor.ready():
            if time.monotonic() >= until:
                return False
            time.sleep(WAIT_SECONDS)
        self._send_masks(core, self._early)
        return True

    @contextmanager
    def _guarded(self, core: EngineCore) -> Iterator[None]:
        """Context manager: end a replica that fails. In lock-step, and of the last replica, the error is raised."""
        try:
            yield
        except Exception as fault:
            if self.lockstep:
                raise
            self._bury(core, fault)

    def check(self) -> None:
        """Assert every invariant of the bookkeeping; when idle, also that no block is held."""
        for core in self._turns:
            core.check()
        assert self._homes.keys() >= set(self.handles), "a request has no replica"
        assert self.has_work or not self._homes, "a request that ended has a replica"

    def _advance_together(self) -> list[Advance]:
        """Plan a step of every replica, agree, submit all of them, and only then wait for results.

        The exchanges of a step end when every replica has it. So no result is waited for before all are submitted.
        """
        cores = self.cores
        planned = [core.begin_step() for core in cores] if all(core.has_room for core in cores) else []
        if any(planned):
            switch = -1 if self.balancer is None else self.balancer.next_switch()
            sync = agreed(
                [None if one is None else one.plan for one in planned], switch, drafts=cores[0].facts.drafts_cached
            )
            for core, one in zip(cores, planned, strict=True):
                core.submit(one, sync)
            found = [core.send_masks() if core.needs_masks else None for core in cores]
            full = not all(core.has_room for core in cores)
            return [
                (core, outputs or (core.confirm() if full and core.in_flight else core.state()))
                for core, outputs in zip(cores, found, strict=True)
            ]
        if any(core.in_flight for core in cores):
            return [(core, core.confirm() if core.in_flight else core.state()) for core in cores]
        return [(core, core.state(wait=True)) for core in cores]

    def _advance_each(self) -> list[Advance]:
        """Plan and submit a step of every replica with room; take the results that have come. Wait if none moved."""
        moved, found, self._early = bool(self._early), self._early, []
        self._arrived.clear()
        for core in self.live:
            with self._guarded(core):
                moved |= self._advance_one(core, found)
        if not moved and not self._died and not any(outputs.finished for _, outputs in found):
            if any(core.in_flight for core in self._turns):
                self._arrived.wait(WAIT_SECONDS)
            else:
                found += [(core, core.state(wait=True)) for core in self._turns]
        return found

    @staticmethod
    def _advance_one(core: EngineCore, found: list[Advance]) -> bool:
        """Advance an independent replica as far as possible without a wait. Returns True when it moved."""
        core.executor.check_alive()
        if moved := (planned := core.begin_step()) is not None:
            core.submit(planned)
        outputs = None
        if core.needs_masks and (len(core.in_flight) == 1 or core.executor.ready()):
            moved = True
            Replicas._send_masks(core, found)
        elif core.in_flight and not core.needs_masks and core.executor.ready():
            moved, outputs = True, core.confirm()
        found.append((core, outputs or core.state()))
        return moved

    @staticmethod
    def _send_masks(core: EngineCore, found: list[Advance]) -> None:
        """Send the masks of an independent replica. The outputs of the step before count, even if that raises."""
        if len(core.in_flight) > 1:
            found.append((core, core.confirm()))
        core.send_masks()

    def _bury(self, core: EngineCore, fault: Exception) -> None:
        """End the requests of a replica that failed. Raises its error when it is the last one."""
        if len(self._turns) == 1:
            raise fault
        number = self.cores.index(core)
        LOG.error(
            "replica %d of %d stopped; the others go on: %s",
            number,
            len(self.cores),
            fault,
            exc_info=None if isinstance(fault, EngineDead) else fault,
        )
        words = fault if isinstance(fault, EngineDead) else f"{type(fault).__name__}: {fault}."
        self._died = True
        self._turns.remove(core)
        last = self._states[core]
        states = last.prefix.states
        states = msgspec.structs.replace(states, num_checkpoints=0, num_used=0, tiers=_without_sizes(states.tiers))
        prefix = msgspec.structs.replace(last.prefix, states=states)
        kept = {name: getattr(last, name) for name in (*TOTALS, "drafts")}
        self._states[core] = StepStats(**kept, tiers=_without_sizes(last.tiers), prefix=prefix)
        self._ended += core.state().finished
        self._ended += [
            Finish(
                handle=handle,
                reason=FinishReason.ERROR,
                error="replica",
                message=f"replica {number} stopped: {words} Send the request again: other replicas run.",
            )
            for handle in core.handles
        ]
        self._homes = {handle: home for handle, home in self._homes.items() if home is not core}
        core.shutdown(wait=False)  # the others go on

    def _merged(self, every: Sequence[Advance]) -> StepOutputs:
        """Return the outputs of several replicas, and the requests that ended beside them, as those of one step."""
        self._states |= {core: outputs.stats for core, outputs in every if core in self._turns}
        found = [outputs for _, outputs in every]
        ended, self._ended, self._died = self._ended, [], False
        counts: dict[str, Any] = {name: sum(getattr(one.stats, name) for one in found) for name in COUNTS}
        states: dict[str, Any] = {name: sum(getattr(one, name) for one in self._states.values()) for name in STATES}
        states["tiers"] = _summed(one.tiers for one in self._states.values())
        states["prefix"] = _prefixes([one.prefix for one in self._states.values()])
        states["replicas"] = {
            number: self._states[core].num_running for number, core in enumerate(self.cores) if core in self._turns
        }
        joined: dict[str, Any] = {
            name: {handle: value for one in found for handle, value in getattr(one, name).items()} for name in BY_HANDLE
        }
        joined["homes"] = {handle: self.cores.index(core) for core, one in every for handle in one.cached}
        return StepOutputs(
            handles=np.concatenate([NO_TOKENS, *(one.handles for one in found)]),
            tokens=np.concatenate([NO_TOKENS, *(one.tokens for one in found)]),
            finished=(*ended, *(finish for one in found for finish in one.finished)),
            preempted=tuple(handle for one in found for handle in one.preempted),
            **joined,
            adapters=self._adapters(),
            stats=StepStats(
                step=max((one.stats.step for one in found), default=-1),
                **counts,
                **states,
                drafts=tuple(map(sum, zip_longest(*(one.drafts for one in self._states.values()), fillvalue=0))),
                balancedness=0.0 if self.balancer is None else self.balancer.balancedness,
            ),
        )

    def _adapters(self) -> AdapterStats | None:
        """Return the adapters of all replicas. Of those that died, only the counts are left."""
        slots = {core: core.scheduler.roster.adapters for core in self.cores}
        found = [one.stats(alive=core in self._turns) for core, one in slots.items() if one is not None]
        return summed(found) if found else None


def load(core: EngineCore) -> float:
    """Return the load of a replica: its requests; waiting ones count more while much of its KV cache is in use."""
    scheduler, pool = core.scheduler, core.scheduler.allocator.pool
    waiting = len(scheduler.queue) + scheduler.roster.num_blocked
    used = 1 - pool.num_free / core.facts.num_blocks
    return len(scheduler.table) + waiting * (1 + WEIGHT * max(0.0, used - FULL))


def _summed(parts: Iterable[dict[Tier, TierStats]]) -> dict[Tier, TierStats]:
    """Return the sums of the counters of several replicas, by tier."""
    found: dict[Tier, TierStats] = {}
    for tier, stats in (entry for part in parts for entry in part.items()):
        known = found.get(tier, TierStats())
        found[tier] = TierStats(
            **{name: getattr(known, name) + getattr(stats, name) for name in TierStats.__struct_fields__}
        )
    return found


def _prefixes(parts: Sequence[PrefixStats]) -> PrefixStats:
    """Return the sums of the counters of the prefix caches of several replicas."""
    names = (name for name in StateStats.__struct_fields__ if name != "tiers")
    counts = {name: sum(getattr(one.states, name) for one in parts) for name in names}
    return PrefixStats(
        queries=sum(one.queries for one in parts),
        hits=sum(one.hits for one in parts),
        states=StateStats(**counts, tiers=_summed(one.states.tiers for one in parts)),
    )


def _without_sizes(tiers: dict[Tier, TierStats]) -> dict[Tier, TierStats]:
    """Return the counters of tiers that are gone."""
    return {tier: msgspec.structs.replace(one, num_blocks=0, num_used=0) for tier, one in tiers.items()}


def _excess(core: EngineCore) -> int:
    """Return the number of a replica's waiting requests that its free slots do not take; below 0: of slots left."""
    scheduler = core.scheduler
    return len(scheduler.queue) + scheduler.roster.num_blocked - scheduler.table.num_free


def _nobody(seconds: float | None) -> object:
    """Wait for a replica that was not asked. See `Executor.ask`."""
    raise TimeoutError


Core = EngineCore | Replicas  # an engine core, whoever asks it


def check_adapter(core: Core, adapter: Adapter) -> None:
    """Raise an error if an engine serves no adapters, or the adapter does not fit its model."""
    adapters = (core.cores[0] if isinstance(core, Replicas) else core).scheduler.roster.adapters
    if adapters is None:
        raise InvalidParameter(NO_ADAPTERS, param="model")
    adapters.check(adapter)


def flush(core: Core) -> None:
    """End the copies of KV blocks that are under way, before an engine without requests is closed."""
    until, cores = time.monotonic() + FLUSH_SECONDS, core.cores if isinstance(core, Replicas) else (core,)
    for one in cores:
        one.flushing = True
    with suppress(EngineDead):
        while core.has_work and not core.handles and not core.torn and time.monotonic() < until:
            core.step()
    for one in cores:
        one.flushing = False
