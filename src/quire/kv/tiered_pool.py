"""A pool of the device with the tiers below it: what they hold by key, and the jobs that bring it nearer or farther.

    device   the pool               where steps read and write
    host     a `BlockPool`          between the device and everything else
    below    `KeyedTier`s: a disk, peers        find blocks by key; filled from the host tier, read into it; GPUs of
                                                peers into the device

Every movement is a `CopyJob` in a step's plan, and counts when its report comes. A store to the host tier holds no
device block: when the device pool drops the key first, the copy is worthless. A load takes device blocks of its own and
publishes them when they are whole, so it belongs to no request.
KV blocks and checkpoints of states have a `TieredPool` each; here both are called blocks. Knows keys, blocks and jobs.
Knows nothing of bytes (`kvstore/`), token chains and requests (`store.py`).
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from quire.contracts.output import TierStats
from quire.contracts.step import CopyJob, FinishedCopy, Tier
from quire.kv.copy_jobs import LOAD, STORE, CopyJobs, link_from
from quire.kv.pool import BlockPool
from quire.kv.sharing import KeyedTier

LOG = logging.getLogger("quire").getChild("kv")
DISK_PART = 8  # blocks of a job that reads files: one that hangs keeps these
MOST_MOVING = 512  # blocks on their way to the host tier; and to the disk tier: what is beyond is not written
RETRY_SECONDS = 60.0  # a tier that was full, or did not answer, is tried again after so long


class BlockPlace(Enum):
    """State of a block, as the device sees it."""

    RESIDENT = "resident"  # on the device
    LOADABLE = "loadable"  # in another tier
    PENDING = "pending"  # a job brings it nearer
    MISSING = "missing"


class FoundBlock(NamedTuple):
    """Place of a block.

    tier   DEVICE: it is there;  another one: where it is, or where it comes from
    block  number of the block on the device; 0: it is not there
    job    number of the job that brings it nearer; -1: none does
    """

    tier: Tier
    block: int = 0
    job: int = -1


class TieredPool:
    """The tiers below a pool of the device. One thread calls it.

    pool     of the device
    host     pool of the host tier
    below    tiers below the host tier, the nearest first
    stats    counters of each tier below the device, since the start
    jobs     copies that are planned or run
    late     jobs that a request has waited for in vain; they may hang for ever
    on_whole   functions to call with device blocks whose content a job has read or written, and their keys
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        num_host_blocks: int,
        below: tuple[KeyedTier, ...],
        reserve: int,
        clock: Callable[[], float],
        numbers: Iterator[int],
        states: bool = False,
    ) -> None:
        """Listen to `pool`.

        reserve   blocks that the next steps may take; a prompt takes all of its blocks at once
        numbers   gives the numbers of jobs
        states    True: its blocks are checkpoints of states
        """
        self.pool, self.host, self.below = pool, BlockPool(num_host_blocks), below
        self.stats = {Tier.HOST: TierStats(num_blocks=num_host_blocks)} | {one.tier: TierStats() for one in below}
        self._reserve, self._clock = reserve, clock
        links = [STORE, LOAD, *(link_from(one.tier) for one in below), *((Tier.HOST, one.tier) for one in below)]
        self.jobs = CopyJobs(links, numbers, states=states)
        self.late: set[int] = set()
        self.on_whole: list[Callable[[int, bytes], None]] = []
        self._offered: dict[int, bytes] = {}  # device block -> key, to be stored by write-through
        self._arrived: list[bytes] = []  # keys that came to the host tier from the device, for the tiers below
        # Tiers that take, or give, no blocks -> time from which they are tried again.
        self._full = {one.tier: math.inf for one in below if not one.takes}
        self._lost = dict[Tier, float]()
        self._few = max(1, min(reserve, pool.num_blocks) // 8)  # blocks that may be taken before others are looked for
        self._seen = self._state()  # when blocks to store were looked for last
        pool.on_drop.append(self._note_drop)

    # --- what is where ------------------------------------------------------------------------------------------

    def where(self, key: bytes) -> FoundBlock | None:
        """Return the place of a block; None: no tier has it, or it comes by a job that was waited for in vain."""
        if (block := self.pool.lookup(key)) is not None:
            return FoundBlock(Tier.DEVICE, block)
        moves = self._on_its_way(key)
        if moves is not None and moves[1] not in self.late:
            return FoundBlock(moves[0], job=moves[1])
        if self.host.lookup(key) is not None:
            return FoundBlock(Tier.HOST)
        tier = self._holder(key) if moves is None else None
        return None if tier is None else FoundBlock(tier)

    def place(self, key: bytes) -> BlockPlace:
        """Return the state of a block."""
        if (found := self.where(key)) is None:
            return BlockPlace.MISSING
        if found.block:
            return BlockPlace.RESIDENT
        return BlockPlace.LOADABLE if found.job < 0 else BlockPlace.PENDING

    def holder(self, tier: Tier, key: bytes) -> str:
        """Return the address of the engine from which a tier has a block; "" for tiers of this engine."""
        return next((one.holder(key) for one in self.below if one.tier == tier), "")

    # --- jobs ---------------------------------------------------------------------------------------------------

    def bring(self, wanted: dict[Tier, dict[bytes, None]]) -> set[int]:
        """Begin to bring blocks nearer to the device, as far as there is room; return the numbers of the jobs.

        wanted   tier that has the blocks -> their keys
        """
        jobs = set[int]()
        if now := [*wanted.get(Tier.HOST, ())][: self.pool.num_free]:
            jobs.add(self._load(now))
        for below in self.below:
            pool = self.pool if (link := link_from(below.tier))[1] == Tier.DEVICE else self.host
            every = [*wanted.get(below.tier, ())][: pool.num_free]
            for at in range(0, len(every), size := DISK_PART if below.tier == Tier.DISK else max(1, len(every))):
                some = every[at : at + size]
                jobs.add(
                    self.jobs.begin(link, some, sources=below.holders(some), targets=pool.take(len(some)), after=False)
                )
        return jobs

    def busy(self, waited: set[int], *, writes: bool) -> bool:
        """True when there may be something to plan, or jobs are under way.

        waited   jobs that requests wait for;  writes   count also other jobs with the tiers below
        """
        return (
            bool(self._arrived or self._offered)
            or self._state() != self._seen
            or any(
                writes or number in waited or Tier.DEVICE in (one.job.source, one.job.target)
                for number, one in self.jobs.running.items()
            )
        )

    def offer(self, block: int, key: bytes) -> None:
        """Store a device block that holds its content after the step that is being planned."""
        self._offered[block] = key

    def plan(self) -> None:
        """Plan stores and writes of the step that is being planned. Call this after the step's blocks are taken."""
        self._plan_stores()
        self._plan_writes()

    def end(self, report: FinishedCopy) -> None:
        """Apply the report of a job: publish blocks that came, and forget blocks that failed."""
        running = self.jobs.end(report)
        self.late.discard(report.id)
        job, failed = running.job, set(report.failed)
        whole = [i for i in range(len(job.keys)) if i not in failed and i not in running.void]
        self._note_error(job, report.error)
        self._settle(job, failed, running.void, whole)
        self._count(job, report, len(whole))

    def distrust(self, keys: Iterable[bytes]) -> None:
        """Forget blocks in every tier below the device, also those that are on their way."""
        keys = list(keys)
        for key in keys:
            self.jobs.void(key)
        self.host.forget([block for key in keys if (block := self.host.lookup(key)) is not None])
        for one in self.below:
            one.discard(keys)

    def reset(self) -> None:
        """Forget the content of every tier below the device. The device's pool is reset by its owner, before."""
        self.jobs.void_all()
        self._offered.clear()
        self._arrived.clear()
        self.host.reset()
        for one in self.below:
            one.clear()

    def counters(self) -> dict[Tier, TierStats]:
        """Return the counters of each tier."""
        self.stats[Tier.HOST].num_used = self.host.num_blocks - self.host.num_free + self.host.num_cached
        return {tier: msgspec.structs.replace(stats) for tier, stats in self.stats.items()}

    def written(self) -> list[int]:
        """Return the device blocks that jobs write, once per reference."""
        return [
            block
            for running in self.jobs.running.values()
            if running.job.target == Tier.DEVICE
            for block in running.job.targets.tolist()
        ]

    def check(self, leased: Iterable[int] = ()) -> None:
        """Assert every invariant; O(blocks). leased: blocks of the host tier that leases reference."""
        self.host.check()
        self.jobs.check()
        refs = Counter([*self.jobs.blocks(Tier.HOST), *leased])
        wrong = [block for block in range(self.host.num_blocks + 1) if refs[block] != self.host.refs(block)]
        assert not wrong, f"references of host blocks {wrong[:8]} are not those of jobs and leases"

    # --- inside -------------------------------------------------------------------------------------------------

    def _holder(self, key: bytes) -> Tier | None:
        """Return the nearest tier below the host tier that holds a block; None when none does. A block that is being
        written does not count: the host tier has it, or it was forgotten meanwhile."""
        return next(
            (
                one.tier
                for one in self.below
                if self.jobs.find((Tier.HOST, one.tier), key) is None and one.has(key) and self._gives(one.tier)
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
        for source in (Tier.HOST, *(one.tier for one in self.below)):
            if (job := self.jobs.find(link_from(source), key)) is not None:
                return source, job
        return None

    def _load(self, keys: Sequence[bytes]) -> int:
        """Plan a load from the host tier to the device and return its number."""
        sources = [block for key in keys if (block := self.host.lookup(key)) is not None]
        self.host.share(sources)
        return self.jobs.begin(LOAD, keys, sources=sources, targets=self.pool.take(len(keys)), after=False)

    def _plan_stores(self) -> None:
        """Plan a store of offered blocks and of those that the next steps may evict, if the host tier has room.

        Offered ones wait for a later step while too many are on their way, unless they are evicted meanwhile. Of the
        others, the host tier keeps the copies that it has: otherwise they would drive each other out for ever.
        """
        pool, jobs, state = self.pool, self.jobs, self._state()
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
        for one in self.below:
            link = (Tier.HOST, one.tier)
            takes = self._clock() >= self._full.get(one.tier, 0.0)
            new = [key for key in arrived if takes and self.jobs.find(link, key) is None]
            found = [(key, block) for key in new if (block := self.host.lookup(key)) is not None and not one.has(key)]
            room = max(0, MOST_MOVING - self.jobs.num_moving(link))
            self.stats[one.tier].num_dropped += len(found[room:])
            if found := found[:room]:
                blocks = [block for _, block in found]
                self.host.share(blocks)
                self.jobs.begin(link, [key for key, _ in found], sources=blocks, after=True)

    def _state(self) -> tuple[int, ...]:
        """Return numbers that change when some blocks may have to be stored; not after a store that failed."""
        pool, few = self.pool, self._few
        return pool.num_free // few, pool.generation // few, self.host.generation, self.stats[Tier.HOST].num_stored

    def _settle(self, job: CopyJob, failed: set[int], void: set[int], whole: Sequence[int]) -> None:
        """Give back the blocks of a job that has ended, and publish its targets at the indices `whole`."""
        sources, targets = job.sources.tolist(), job.targets.tolist()
        if job.target in (Tier.DEVICE, Tier.HOST):
            pool = self.pool if job.target == Tier.DEVICE else self.host
            new = [i for i in whole if pool.publish(targets[i], job.keys[i])]
            pool.release(targets)
            self._arrived += [job.keys[i] for i in new] if job.source == Tier.DEVICE and self.below else []
            if Tier.DEVICE in (job.source, job.target):
                known, blocks = (whole, sources) if job.source == Tier.DEVICE else (new, targets)
                for tell in self.on_whole:
                    for i in known:
                        tell(blocks[i], job.keys[i])
        if job.source == Tier.HOST:
            self.host.release(sources)
        if job.source == Tier.HOST and job.target == Tier.DEVICE:  # a copy that cannot be read is no copy
            self.host.forget([sources[i] for i in failed])
        for one in self.below:
            if one.tier == job.source and one.tier not in self._lost:
                one.discard([job.keys[i] for i in failed])
            if one.tier == job.target:
                one.note_written([job.keys[i] for i in whole])
                one.discard([job.keys[i] for i in void])

    def _note_drop(self, key: bytes, why: str) -> None:
        """Make a store of a dropped key worthless: its device block may be written before it is read."""
        self.jobs.void(key, (STORE,))
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
