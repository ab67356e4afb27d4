"""KV blocks beyond the device, and checkpoints of states: which of them a request needs, and which requests wait.

A `TieredPool` holds each kind: the device's pool with host memory, a disk and peers below it. A request that can be
continued by what other tiers hold waits for jobs, its matched blocks leased; then the ordinary match admits it. A model
with recurrent layers goes on where its blocks and a checkpoint meet: both are brought, or neither.
Knows keys, blocks and jobs. Knows nothing of bytes (`kvstore/`), slots, queues and budgets (`engine/`).
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quire.contracts.blocks import KVGeometry
from quire.contracts.output import TierStats
from quire.contracts.step import FileNews, FinishedCopy, StepCopies, Tier
from quire.kv.hashing import KeyChain
from quire.kv.pool import BlockPool
from quire.kv.prefix import PrefixIndex, PrefixMatch, matched_blocks
from quire.kv.sharing import HostedFiles, KeyedTier, Promises, Sharing, block_keys
from quire.kv.states import StateCheckpoints, end_key, last_state, state_key
from quire.kv.tiered_pool import BlockPlace, TieredPool

LOG = logging.getLogger("quire").getChild("kv")
REPORT_SECONDS = 1.0  # an engine without other work asks for the reports of writes after so long
FETCH_SECONDS = 10.0  # a request waits for blocks of other tiers at most this long, then it computes


@dataclass(frozen=True, kw_only=True)
class StateTiers:
    """Tiers of checkpoints below the device.

    checkpoints       those of the device
    num_host_blocks   checkpoints that host memory holds
    below, promises   as of `KVStore`
    """

    checkpoints: StateCheckpoints
    num_host_blocks: int
    below: tuple[KeyedTier, ...] = ()
    promises: Promises | None = None


@dataclass
class _Fetch:
    """The wait of a request for jobs.

    leased       device blocks that its match had found, referenced until its end;  checkpoint   likewise; 0: none
    """

    jobs: set[int]
    leased: list[int]
    deadline: float
    checkpoint: int = 0


class KVStore:
    """The tiers below the device's pool. One thread calls it.

    blocks   tiers of KV blocks;  states   of checkpoints, or None
    host     pool of the host tier of blocks
    stats    counters of each tier of blocks below the device, since the start
    sharing  promises to and from other engines
    num_found  blocks that the tiers of this engine held at its start
    hosted   files of ranks on other hosts: of blocks (False), and of checkpoints (True)
    on_start   functions to call when all replicas of the engine are there;  on_close  when it ends
    on_whole   functions to call with device blocks whose content a job has read or written, and their keys
    """

    def __init__(
        self,
        pool: BlockPool,
        geometry: KVGeometry,
        *,
        num_host_blocks: int,
        below: tuple[KeyedTier, ...] = (),
        promises: Promises | None = None,
        write_through: bool = False,
        reserve: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listen to `pool`, the device's.

        below          tiers below the host tier, the nearest first
        promises       blocks of other engines that requests may count on
        write_through  store every published block; otherwise the blocks that the next steps may evict
        reserve        blocks that the next steps may take; a prompt takes all of its blocks at once
        """
        self._numbers = numbers = itertools.count()
        self.blocks = TieredPool(
            pool, num_host_blocks=num_host_blocks, below=below, reserve=reserve, clock=clock, numbers=numbers
        )
        self.states: TieredPool | None = None
        self._kinds = [self.blocks]
        self.host, self.stats, self.on_whole = self.blocks.host, self.blocks.stats, self.blocks.on_whole
        self.num_found = 0
        self.hosted: dict[bool, HostedFiles] = {}
        self._pool, self._clock, self._write_through = pool, clock, write_through
        self._geometry, self._sizes = geometry, geometry.block_sizes
        self._index = PrefixIndex(_Reachable(self.blocks), geometry)
        self.sharing = Sharing(pool, self.host, block_keys(self._sizes), self.blocks.offer, promises, clock)
        self.on_start: list[Callable[[], None]] = []
        self.on_close: list[Callable[[], None]] = []
        self._fetches: dict[int, _Fetch] = {}
        self._ready: list[int] = []
        self._asked = clock()  # time of the last step, which brings reports
        if write_through:
            pool.on_publish.append(self.blocks.offer)

    def keep_states(self, tiers: StateTiers) -> None:
        """Keep checkpoints in tiers below the device, too. Call this once, before any request."""
        copies = tiers.checkpoints.pool
        self.states = TieredPool(
            copies,
            num_host_blocks=tiers.num_host_blocks,
            below=tiers.below,
            reserve=copies.num_blocks // 4 + 1,
            clock=self._clock,
            numbers=self._numbers,
            states=True,
        )
        self._kinds.append(self.states)
        places = _Reachable(self.states, self._geometry.hit_size)
        self._index = PrefixIndex(_Reachable(self.blocks), self._geometry, places)
        unit = self._geometry.hit_size
        self.sharing.states = Sharing(
            copies, self.states.host, end_key(unit), self.states.offer, tiers.promises, self._clock
        )
        if self._write_through:
            copies.on_publish.append(self.states.offer)

    # --- what a request finds -----------------------------------------------------------------------------------

    def place(self, key: bytes) -> BlockPlace:
        """Return the state of a KV block."""
        return self.blocks.place(key)

    def holder(self, tier: Tier, key: bytes) -> str:
        """Return the address of the engine from which a tier has a block; "" for tiers of this engine."""
        return self.blocks.holder(tier, key)

    def fetch(
        self, handle: int, chain: KeyChain, max_tokens: int, match: PrefixMatch, chunks: Sequence[KeyChain] = ()
    ) -> dict[int, tuple[Tier, bytes]] | None:
        """Begin to bring the blocks with which `match` becomes longer; the request waits until `take_ready` names it.

        max_tokens   as in `PrefixIndex.match`
        chunks       keys of parts of the prompt whose blocks are brought, too, for other positions
        Returns the blocks of `chain`, by index, each with the tier that holds it and the key that it has there, that of
        a block of a group; None: the request need not wait.
        """
        reach, fetch = self._index.match(chain, max_tokens), _Fetch(set(), [], self._clock() + FETCH_SECONDS)
        wanted = list[tuple[KeyChain, PrefixMatch]]()
        if reach.num_tokens > match.num_tokens and self._bring_state(fetch, chain, reach.num_tokens):
            wanted.append((chain, reach))
        wanted += [(chunk, self._index.match(chunk, len(chunk.tokens))) for chunk in chunks]
        found, elsewhere = dict[int, tuple[Tier, bytes]](), dict[Tier, dict[bytes, None]]()
        leased = dict.fromkeys(block for blocks in match.blocks for block in blocks if block)
        for one, places, key in matched_blocks(wanted, self._sizes):
            mine = found if one is chain else dict[int, tuple[Tier, bytes]]()
            if (at := self.blocks.where(key)) is None:
                continue
            if at.block:
                leased[at.block] = None
                continue
            near = at.tier == Tier.HOST and at.job < 0
            mine.update({place: (at.tier, key) for place in places if not near or place not in mine})
            if at.job >= 0:
                fetch.jobs.add(at.job)
            else:
                elsewhere.setdefault(at.tier, {})[key] = None
        fetch.leased += leased
        self._pool.share(fetch.leased)
        fetch.jobs |= self.blocks.bring(elsewhere)
        if not fetch.jobs:
            self._release(fetch)
            return None
        assert handle not in self._fetches, "a request waits twice"
        self._fetches[handle] = fetch
        return found

    def take_ready(self) -> tuple[list[int], list[int]]:
        """Return the handles of requests whose jobs have ended, and of those whose time is over."""
        ready, self._ready = self._ready, []
        late = [handle for handle, fetch in self._fetches.items() if fetch.deadline <= self._clock()]
        for handle in late:
            LOG.warning("a request waited %.0f s for KV blocks of other tiers; it computes them.", FETCH_SECONDS)
            for kind in self._kinds:
                kind.late |= self._fetches[handle].jobs & kind.jobs.running.keys()
            self.forget(handle)
        return ready, late

    def forget(self, handle: int) -> None:
        """Forget that a request waits; its jobs go on. A request that does not wait is ignored."""
        fetch = self._fetches.pop(handle, None)
        if fetch is not None:
            self._release(fetch)
        elif handle in self._ready:
            self._ready.remove(handle)

    # --- jobs ---------------------------------------------------------------------------------------------------

    def busy(self, *, writes: bool) -> bool:
        """True when there may be something to plan, or jobs are under way. `writes`: count also those with the tiers
        below that no request waits for. Otherwise these count once in a while: they hold blocks of the host tier."""
        writes = writes or self._clock() >= self._asked + REPORT_SECONDS
        waited = {job for fetch in self._fetches.values() for job in fetch.jobs}
        told = any(files.drops for files in self.hosted.values())
        return told or any(kind.busy(waited, writes=writes) for kind in self._kinds)

    def take_copies(self) -> StepCopies | None:
        """Return the jobs of the step that is being planned, or None. Call this after the step's blocks are taken."""
        self._asked = self._clock()
        self.sharing.expire()
        for kind in self._kinds:
            kind.plan()
        parts = [copies for kind in self._kinds if (copies := kind.jobs.take()) is not None]
        dropped = [one for states, files in self.hosted.items() for one in files.take_dropped(states=states)]
        if not parts and not dropped:
            return None
        return StepCopies(
            before=tuple(job for one in parts for job in one.before),
            after=tuple(job for one in parts for job in one.after),
            dropped=tuple(dropped),
        )

    def finished(self, reports: Iterable[FinishedCopy], files: Iterable[FileNews] = ()) -> None:
        """Apply the reports of a step: publish blocks that came, forget blocks that failed, free requests that wait.

        files   changes of the files of ranks on other hosts, which count first
        """
        for news in files:
            self.hosted[news.states].hear(news)
        for report in reports:
            next(kind for kind in self._kinds if report.id in kind.jobs.running).end(report)
            for handle, fetch in list(self._fetches.items()):
                fetch.jobs.discard(report.id)
                if not fetch.jobs:
                    self.forget(handle)
                    self._ready.append(handle)

    def distrust(self, keys: Iterable[bytes]) -> None:
        """Forget blocks and states with these keys in every tier below the device, also those that are on their way."""
        keys = list(keys)
        for kind in self._kinds:
            kind.distrust(keys)

    def reset(self) -> None:
        """Forget the content of every tier below the device. The device's pools are reset by their owner, before."""
        for kind in self._kinds:
            kind.reset()

    def counters(self) -> dict[Tier, TierStats]:
        """Return the counters of each tier of KV blocks."""
        return self.blocks.counters()

    def held(self) -> list[int]:
        """Return the device blocks that this store references, once per reference."""
        leases = [block for fetch in self._fetches.values() for block in fetch.leased]
        return leases + self.blocks.written()

    def held_states(self) -> list[int]:
        """Return the checkpoints on the device that this store references, once per reference."""
        leases = [fetch.checkpoint for fetch in self._fetches.values() if fetch.checkpoint]
        return leases + (self.states.written() if self.states is not None else [])

    def check(self) -> None:
        """Assert every invariant; O(blocks)."""
        self.blocks.check(self.sharing.held())
        if self.states is not None and self.sharing.states is not None:
            self.states.check(self.sharing.states.held())
        running = set().union(*(kind.jobs.running.keys() for kind in self._kinds))
        for fetch in self._fetches.values():
            assert fetch.jobs and fetch.jobs <= running, "a request waits for no job"

    # --- inside -------------------------------------------------------------------------------------------------

    def _bring_state(self, fetch: _Fetch, chain: KeyChain, length: int) -> bool:
        """Hold the checkpoint at `length`, or begin to bring it. Return False when it cannot be had."""
        if self.states is None:
            return True
        key = state_key(chain, length)
        if (at := self.states.where(key)) is None:
            return False
        if at.block:
            self.states.pool.share([at.block])
            fetch.checkpoint = at.block
            return True
        jobs = {at.job} if at.job >= 0 else self.states.bring({at.tier: {key: None}})
        fetch.jobs |= jobs
        return bool(jobs)

    def _release(self, fetch: _Fetch) -> None:
        self._pool.release(fetch.leased)
        if fetch.checkpoint and self.states is not None:
            self.states.pool.release([fetch.checkpoint])


class _Reachable:
    """Lookup over all tiers of blocks or checkpoints, for a `PrefixIndex`: says only that they can be had.

    unit   tokens between two places of checkpoints
    """

    generation = 0  # nothing is taken by such a match

    def __init__(self, tiers: TieredPool, unit: int = 1) -> None:
        self._tiers, self._unit = tiers, unit

    def lookup(self, key: bytes) -> int | None:
        """Return 1 for a block that some tier holds."""
        tiers = self._tiers
        return 1 if tiers.pool.lookup(key) is not None or tiers.where(key) is not None else None

    def find(self, chain: KeyChain, most: int) -> tuple[int, int]:
        """Return (length, 1) of the longest beginning with a checkpoint in some tier. See `StateFinder`."""
        return last_state(chain, most, self._unit, self.lookup)
