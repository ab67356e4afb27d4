"""KV blocks beyond the device: which tiers hold a block, which jobs bring it, and which requests wait for it.

    device   the allocator's pool               where steps read and write
    host     a `BlockPool` of this store        between the device and everything else
    below    `KeyedTier`s: a disk, peers        find blocks by key; filled from the host tier, read into it; GPUs of
                                                peers into the device

Every movement is a `CopyJob` in a step's plan, and counts when its report comes. A store holds no device block: when
the device pool drops the key first, the copy is worthless. A load takes device blocks of its own and publishes them
when they are whole, so it belongs to no request; requests wait for jobs, then the ordinary match admits them.
Knows keys, blocks and jobs. Knows nothing of bytes (`kvstore/`), slots, queues and budgets (`engine/`).
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from quire.contracts.blocks import KVGeometry
from quire.contracts.output import TierStats
from quire.contracts.step import CopyJob, FinishedCopy, StepCopies, Tier
from quire.kv.copy_jobs import LOAD, STORE, CopyJobs, link_from
from quire.kv.hashing import KeyChain
from quire.kv.pool import BlockPool
from quire.kv.prefix import PrefixIndex, PrefixMatch, matched_blocks
from quire.kv.sharing import KeyedTier, Promises, Sharing

LOG = logging.getLogger("quire").getChild("kv")
DISK_PART = 8  # blocks of a job that reads files: one that hangs keeps these
MOST_MOVING = 512  # blocks on their way to the host tier; and to the disk tier: what is beyond is not written
REPORT_SECONDS = 1.0  # an engine without other work asks for the reports of writes after so long
RETRY_SECONDS = 60.0  # a tier that was full, or did not answer, is tried again after so long
FETCH_SECONDS = 10.0  # a request waits for blocks of other tiers at most this long, then it computes


class BlockPlace(Enum):
    """State of a block, as the device sees it."""

    RESIDENT = "resident"  # on the device
    LOADABLE = "loadable"  # in another tier
    PENDING = "pending"  # a job brings it nearer
    MISSING = "missing"


@dataclass
class _Fetch:
    """The wait of a request for jobs. `leased`: device blocks that its match had found, referenced until its end."""

    jobs: set[int]
    leased: list[int]
    deadline: float


class KVStore:
    """The tiers below the device's pool. One thread calls it.

    host     pool of the host tier
    stats    counters of each tier below the device, since the start
    sharing  promises to and from other engines
    num_found  blocks that the tiers of this engine held at its start
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
        self.host = BlockPool(num_host_blocks)
        self.num_found = 0
        self.stats = {Tier.HOST: TierStats(num_blocks=num_host_blocks)} | {one.tier: TierStats() for one in below}
        self._pool, self._below, self._reserve, self._clock = pool, below, reserve, clock
        self._sizes = geometry.block_sizes
        self._index = PrefixIndex(_Reachable(self), geometry)
        self.sharing = Sharing(pool, self.host, geometry.block_sizes, self.offer, promises, clock)
        self.on_start: list[Callable[[], None]] = []
        self.on_close: list[Callable[[], None]] = []
        self.on_whole: list[Callable[[int, bytes], None]] = []
        links = [STORE, LOAD, *(link_from(one.tier) for one in below), *((Tier.HOST, one.tier) for one in below)]
        self._jobs = CopyJobs(links)
        self._offered: dict[int, bytes] = {}  # device block -> key, to be stored by write-through
        self._arrived: list[bytes] = []  # keys that came to the host tier from the device, for the tiers below
        self._fetches: dict[int, _Fetch] = {}
        self._ready: list[int] = []
        self._late: set[int] = set()  # jobs that a request has waited for in vain; they may hang for ever
        # Tiers that take, or give, no blocks -> time from which they are tried again.
        self._full = {one.tier: math.inf for one in below if not one.takes}
        self._lost = dict[Tier, float]()
        self._few = max(1, min(reserve, pool.num_blocks) // 8)  # blocks that may be taken before others are looked for
        self._asked = clock()  # time of the last step, which brings reports
        self._seen = self._state()  # when blocks to store were looked for last
        pool.on_drop.append(self._note_drop)
        if write_through:
            pool.on_publish.append(self.offer)

    # --- what a request finds -----------------------------------------------------------------------------------

    def place(self, key: bytes) -> BlockPlace:
        """Return the state of a block."""
        if self._pool.lookup(key) is not None:
            return BlockPlace.RESIDENT
        moves = self._on_its_way(key)
        if moves is not None and moves[1] not in self._late:
            return BlockPlace.PENDING
        if self.host.lookup(key) is not None:
            return BlockPlace.LOADABLE
        return BlockPlace.LOADABLE if moves is None and self._holder(key) is not None else BlockPlace.MISSING

    def holder(self, tier: Tier, key: bytes) -> str:
        """Return the address of the engine from which a tier has a block; "" for tiers of this engine."""
        return next((one.holder(key) for one in self._below if one.tier == tier), "")

    def fetch(
        self, handle: int, chain: KeyChain, max_tokens: int, match: PrefixMatch, chunks: Sequence[KeyChain] = ()
    ) -> dict[int, tuple[Tier, bytes]] | None:
        """Begin to bring the blocks with which `match` becomes longer; the request waits until `take_ready` names it.

        max_tokens   as in `PrefixIndex.match`
        chunks       keys of parts of the prompt whose blocks are brought, too, for other positions
        Returns the blocks of `chain`, by index, each with the tier that holds it and the key that it has there, that of
        a block of a group; None: the request need not wait.
        """
        reach = self._index.match(chain, max_tokens)
        wanted = [(chain, reach)] if reach.num_tokens > match.num_tokens else []
        wanted += [(chunk, self._index.match(chunk, len(chunk.tokens))) for chunk in chunks]
        jobs, found = set[int](), dict[int, tuple[Tier, bytes]]()
        near, far = dict[bytes, None](), dict[Tier, dict[bytes, None]]()
        leased = dict.fromkeys(block for blocks in match.blocks for block in blocks if block)
        for one, places, key in matched_blocks(wanted, self._sizes):
            mine = found if one is chain else dict[int, tuple[Tier, bytes]]()
            if (block := self._pool.lookup(key)) is not None:
                leased[block] = None
            elif (moves := self._on_its_way(key)) is not None and moves[1] not in self._late:
                mine.update(dict.fromkeys(places, (moves[0], key)))
                jobs.add(moves[1])
            elif self.host.lookup(key) is not None:
                mine.update({place: (Tier.HOST, key) for place in places if place not in mine})
                near[key] = None
            elif (tier := self._holder(key)) is not None:
                mine.update(dict.fromkeys(places, (tier, key)))
                far.setdefault(tier, {})[key] = None
        self._pool.share([*leased])
        if now := [*near][: self._pool.num_free]:
            jobs.add(self._load(now))
        for below in self._below:
            pool = self._pool if (link := link_from(below.tier))[1] == Tier.DEVICE else self.host
            every = [*far.get(below.tier, ())][: pool.num_free]
            for at in range(0, len(every), size := DISK_PART if below.tier == Tier.DISK else max(1, len(every))):
                some = every[at : at + size]
                jobs.add(
                    self._jobs.begin(link, some, sources=below.holders(some), targets=pool.take(len(some)), after=False)
                )
        if not jobs:
            self._pool.release([*leased])
            return None
        assert handle not in self._fetches, "a request waits twice"
        self._fetches[handle] = _Fetch(jobs, [*leased], self._clock() + FETCH_SECONDS)
        return found

    def take_ready(self) -> tuple[list[int], list[int]]:
        """Return the handles of requests whose jobs have ended, and of those whose time is over."""
        ready, self._ready = self._ready, []
        late = [handle for handle, fetch in self._fetches.items() if fetch.deadline <= self._clock()]
        for handle in late:
            LOG.warning("a request waited %.0f s for KV blocks of other tiers; it computes them.", FETCH_SECONDS)
            self._late |= self._fetches[handle].jobs
            self.forget(handle)
        return ready, late

    def forget(self, handle: int) -> None:
        """Forget that a request waits; its jobs go on. A request that does not wait is ignored."""
        fetch = self._fetches.pop(handle, None)
        if fetch is not None:
            self._pool.release(fetch.leased)
        elif handle in self._ready:
            self._ready.remove(handle)

    # --- jobs ---------------------------------------------------------------------------------------------------

    def busy(self, *, writes: bool) -> bool:
        """True when there may be something to plan, or jobs are under way. `writes`: count also those with the tiers
        below that no request waits for. Otherwise these count once in a while: they hold blocks of the host tier."""
        writes = writes or self._clock() >= self._asked + REPORT_SECONDS
        waited = {job for fetch in self._fetches.values() for job in fetch.jobs}
        return (
            bool(self._arrived or self._offered)
            or self._state() != self._seen
            or any(
                writes or number in waited or Tier.DEVICE in (one.job.source, one.job.target)
                for number, one in self._jobs.running.items()
            )
        )

    def offer(self, block: int, key: bytes) -> None:
        """Store a device block that holds its content after the step that is being planned."""
        self._offered[block] = key

    def take_copies(self) -> StepCopies | None:
        """Return the jobs of the step that is being planned, or None. Call this after the step's blocks are taken."""
        self._asked = self._clock()
        self.sharing.expire()
        self._plan_stores()
        self._plan_writes()
        return self._jobs.take()

    def finished(self, reports: Iterable[FinishedCopy]) -> None:
        """Apply the reports of a step: publish blocks that came, forget blocks that failed, free requests that wait."""
        for report in reports:
            running = self._jobs.end(report)
            self._late.discard(report.id)
            job, failed = running.job, set(report.failed)
            whole = [i for i in range(len(job.keys)) if i not in failed and i not in running.void]
            self._note_error(job, report.error)
            self._settle(job, failed, running.void, whole)
            self._count(job, report, len(whole))
            for handle, fetch in list(self._fetches.items()):
                fetch.jobs.discard(job.id)
                if not fetch.jobs:
                    self.forget(handle)
                    self._ready.append(handle)

    def distrust(self, keys: Iterable[bytes]) -> None:
        """Forget blocks in every tier below the device, also those that are on their way."""
        keys = list(keys)
        for key in keys:
            self._jobs.void(key)
        self.host.forget([block for key in keys if (block := self.host.lookup(key)) is not None])
        for one in self._below:
            one.discard(keys)

    def reset(self) -> None:
        """Forget the content of every tier below the device. The device's pool is reset by its owner, before."""
        self._jobs.void_all()
        self._offered.clear()
        self._arrived.clear()
        self.host.reset()
        for one in self._below:
            one.clear()

    def counters(self) -> dict[Tier, TierStats]:
        """Return the counters of each tier."""
        self.stats[Tier.HOST].num_used = self.host.num_blocks - self.host.num_free + self.host.num_cached
        return {tier: msgspec.structs.replace(stats) for tier, stats in self.stats.items()}

    def held(self) -> list[int]:
        """Return the device blocks that this store references, once per reference."""
        leases = [block for fetch in self._fetches.values() for block in fetch.leased]
        return leases + [
            block
            for running in self._jobs.running.values()
            if running.job.target == Tier.DEVICE
            for block in running.job.targets.tolist()
        ]

    def check(self) -> None:
        """Assert every invariant; O(blocks)."""
        self.host.check()
        self._jobs.check()
        refs = Counter(self._jobs.blocks(Tier.HOST) + self.sharing.held())
        wrong = [block for block in range(self.host.num_blocks + 1) if refs[block] != self.host.refs(block)]
        assert not wrong, f"references of host blocks {wrong[:8]} are not those of jobs and leases"
        for fetch in self._fetches.values():
            assert fetch.jobs and fetch.jobs <= self._jobs.running.keys(), "a request waits for no job"

    # --- inside -------------------------------------------------------------------------------------------------

    def _holder(self, key: bytes) -> Tier | None:
        """Return the nearest tier below the host tier that holds a block; None when none does. A block that is being
        written does not count: the host tier has it, or it was forgotten meanwhile."""
        return next(
            (
                one.tier
                for one in self._below
                if self._jobs.find((Tier.HOST, one.tier), key) is None and one.has(key) and self._gives(one.tier)
            ),
            None,
        )

    def _gives(self, tier: Tier) -> bool:
        """True unless a tier has not answered lately."""
        return tier not in self._lost or self._clock() >= self._lost[tier]

    def _note_error(self, job: CopyJob, error: str) -> None:
        """Leave a tier alone for a while that takes or gives no blocks, and tell so once."""
        for tier, others, does, still in (
            (job.target, self._full, "takes", "It still gives those that it has."),
            (job.source, self._lost, "gives", "What it has is computed meanwhile."),
        ):
            if tier not in self.stats or tier == Tier.HOST:
                continue
            if error:
                if tier not in others:
                    LOG.warning(
                        "the %s tier %s no more blocks: %s. %s It is tried again after %.0f s.",
                        *(tier, does, error, still, RETRY_SECONDS),
                    )
                others[tier] = max(others.get(tier, 0.0), self._clock() + RETRY_SECONDS)
            elif others.get(tier, math.inf) < math.inf:
                del others[tier]
                LOG.warning("the %s tier %s blocks again.", tier, does)

    def _on_its_way(self, key: bytes) -> tuple[Tier, int] | None:
        """Return the source and the job that brings a block nearer to the device; None when no job does."""
        for source in (Tier.HOST, *(one.tier for one in self._below)):
            if (job := self._jobs.find(link_from(source), key)) is not None:
                return source, job
        return None

    def _load(self, keys: Sequence[bytes]) -> int:
        """Plan a load from the host tier to the device and return its number."""
        sources = [block for key in keys if (block := self.host.lookup(key)) is not None]
        self.host.share(sources)
        return self._jobs.begin(LOAD, keys, sources=sources, targets=self._pool.take(len(keys)), after=False)

    def _plan_stores(self) -> None:
        """Plan a store of offered blocks and of those that the next steps may evict, if the host tier has room.

        Offered ones wait for a later step while too many are on their way, unless they are evicted meanwhile. Of the
        others, the host tier keeps the copies that it has: otherwise they would drive each other out for ever.
        """
        pool, jobs, state = self._pool, self._jobs, self._state()
        if not self._offered and state == self._seen:
            return
        blocks = {block: None for block, key in self._offered.items() if pool.key(block) == key}
        wanted: dict[bytes, int] = {}
        for block in [*blocks, *pool.next_evicted(min(self._reserve, self.host.num_free))]:
            key = pool.key(block)
            assert key is not None
            if (copy := self.host.lookup(key)) is not None:
                self.host.share((copy,))
                self.host.release((copy,))
            elif jobs.find(STORE, key) is None:
                wanted[key] = block
        keys, most = [*wanted], self.host.num_free
        room = max(0, min(MOST_MOVING - jobs.num_moving(STORE), most))
        self._offered = {wanted[key]: key for key in keys[room:most] if wanted[key] in blocks}
        self._seen = state
        if keys := keys[:room]:
            jobs.begin(
                STORE, keys, sources=[wanted[key] for key in keys], targets=self.host.take(len(keys)), after=True
            )

    def _plan_writes(self) -> None:
        """Plan writes of blocks that came to the host tier, to the tiers below."""
        arrived, self._arrived = self._arrived, []
        for one in self._below:
            link = (Tier.HOST, one.tier)
            takes = self._clock() >= self._full.get(one.tier, 0.0)
            new = [key for key in arrived if takes and self._jobs.find(link, key) is None]
            found = [(key, block) for key in new if (block := self.host.lookup(key)) is not None and not one.has(key)]
            room = max(0, MOST_MOVING - self._jobs.num_moving(link))
            self.stats[one.tier].num_dropped += len(found[room:])
            if found := found[:room]:
                blocks = [block for _, block in found]
                self.host.share(blocks)
                self._jobs.begin(link, [key for key, _ in found], sources=blocks, after=True)

    def _state(self) -> tuple[int, ...]:
        """Return numbers that change when some blocks may have to be stored; not after a store that failed."""
        pool, few = self._pool, self._few
        return pool.num_free // few, pool.generation // few, self.host.generation, self.stats[Tier.HOST].num_stored

    def _settle(self, job: CopyJob, failed: set[int], void: set[int], whole: Sequence[int]) -> None:
        """Give back the blocks of a job that has ended, and publish its targets at the indices `whole`."""
        sources, targets = job.sources.tolist(), job.targets.tolist()
        if job.target in (Tier.DEVICE, Tier.HOST):
            pool = self._pool if job.target == Tier.DEVICE else self.host
            new = [i for i in whole if pool.publish(targets[i], job.keys[i])]
            pool.release(targets)
            self._arrived += [job.keys[i] for i in new] if job.source == Tier.DEVICE and self._below else []
            if Tier.DEVICE in (job.source, job.target):
                known, blocks = (whole, sources) if job.source == Tier.DEVICE else (new, targets)
                for tell in self.on_whole:
                    for i in known:
                        tell(blocks[i], job.keys[i])
        if job.source == Tier.HOST:
            self.host.release(sources)
        if job.source == Tier.HOST and job.target == Tier.DEVICE:  # a copy that cannot be read is no copy
            self.host.forget([sources[i] for i in failed])
        for one in self._below:
            if one.tier == job.source and one.tier not in self._lost:
                one.discard([job.keys[i] for i in failed])
            if one.tier == job.target:
                one.note_written([job.keys[i] for i in whole])
                one.discard([job.keys[i] for i in void])

    def _note_drop(self, key: bytes, why: str) -> None:
        """Make a store of a dropped key worthless: its device block may be written before it is read."""
        self._jobs.void(key, (STORE,))
        if why == "distrusted":
            self.distrust([key])
        elif why == "evicted" and self.host.lookup(key) is None:
            self.stats[Tier.HOST].num_dropped += 1

    def _count(self, job: CopyJob, report: FinishedCopy, whole: int) -> None:
        """Count a job for the tier that is farther from the device."""
        stored = job.source == Tier.DEVICE or (job.source == Tier.HOST and job.target != Tier.DEVICE)
        stats = self.stats[job.target if stored else job.source]
        stats.num_failed += len(report.failed)
        if stored:
            stats.num_stored += whole
            stats.stored_bytes += report.num_bytes
            stats.stored_seconds += report.seconds
        else:
            stats.num_loaded += whole
            stats.loaded_bytes += report.num_bytes
            stats.loaded_seconds += report.seconds


class _Reachable:
    """Lookup over all tiers of a store, for a `PrefixIndex`: says only that a block can be had."""

    generation = 0  # nothing is taken by such a match

    def __init__(self, store: KVStore) -> None:
        self._store = store

    def lookup(self, key: bytes) -> int | None:
        """Return 1 for a block that some tier holds."""
        return None if self._store.place(key) is BlockPlace.MISSING else 1
