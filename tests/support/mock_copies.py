"""Tiers of the checked executor: copies that end late, fail in part, or find nothing.

A copy happens as late as it may: when its job is reported. A block to be written holds garbage until then. So the mock
notices a request that reads a block too early, and a store whose device block was written meanwhile.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from quire.contracts.request import Transfer
from quire.contracts.step import CopyJob, FinishedCopy, StepCopies, Tier
from quire.ranks.executor import RankReports, joined_copies

GARBAGE = 0x5A5A5A5A5A5A5A5A
FAULTS = ("", "lost", "half", "corrupt", "full")
Memory = np.ndarray[Any, np.dtype[np.uint64]]


class MockDisk(dict[bytes, Memory]):
    """Blocks by key, as the disk tier of mock executors. Two executors may share it."""

    tier, takes = Tier.DISK, True

    def has(self, key: bytes) -> bool:
        """See `quire.kv.sharing.KeyedTier`."""
        return key in self

    def holders(self, keys: Iterable[bytes]) -> list[int]:
        """See `quire.kv.sharing.KeyedTier`."""
        return [0 for _ in keys] if self.tier == Tier.PEER else []

    def holder(self, key: bytes) -> str:
        """See `quire.kv.sharing.KeyedTier`."""
        return "a peer" if self.tier == Tier.PEER else ""

    def note_written(self, keys: Iterable[bytes]) -> None:
        """See `quire.kv.sharing.KeyedTier`."""

    def discard(self, keys: Iterable[bytes]) -> None:
        """See `quire.kv.sharing.KeyedTier`."""
        for key in keys:
            self.pop(key, None)


class MockRanksDisk:
    """Blocks by key, of which each of two ranks has a part. `tier`: PEER is never written to."""

    def __init__(self, tier: Tier = Tier.DISK, parts: Sequence[MockDisk] = ()) -> None:
        self.tier, self.takes, self.parts = tier, tier == Tier.DISK, parts or (MockDisk(), MockDisk())

    def has(self, key: bytes) -> bool:
        """See `quire.kv.sharing.KeyedTier`."""
        return all(key in part for part in self.parts)

    def holders(self, keys: Iterable[bytes]) -> list[int]:
        """See `quire.kv.sharing.KeyedTier`."""
        return [0 for _ in keys] if self.tier == Tier.PEER else []

    def holder(self, key: bytes) -> str:
        """See `quire.kv.sharing.KeyedTier`."""
        return "a peer" if self.tier == Tier.PEER else ""

    def note_written(self, keys: Iterable[bytes]) -> None:
        """See `quire.kv.sharing.KeyedTier`."""

    def discard(self, keys: Iterable[bytes]) -> None:
        """See `quire.kv.sharing.KeyedTier`."""
        for part in self.parts:
            part.discard(keys)

    def clear(self) -> None:
        """See `quire.kv.sharing.KeyedTier`."""
        for part in self.parts:
            part.clear()


class MockPeers(MockDisk):
    """Blocks of other engines, and the promises of these to requests, by handle."""

    tier, takes = Tier.PEER, False

    def __init__(self, blocks: Mapping[bytes, Memory] | None = None) -> None:
        super().__init__(blocks or {})
        self.promised: dict[int, set[bytes]] = {}

    def has(self, key: bytes) -> bool:
        """See `quire.kv.sharing.KeyedTier`."""
        return key in self or any(key in keys for keys in self.promised.values())

    def discard(self, keys: Iterable[bytes]) -> None:
        """See `quire.kv.sharing.KeyedTier`."""
        keys = set(keys)
        super().discard(keys)
        for promise in self.promised.values():
            promise -= keys

    def clear(self) -> None:
        """See `quire.kv.sharing.KeyedTier`."""
        super().clear()
        for promise in self.promised.values():
            promise.clear()

    def expect(self, handle: int, transfer: Transfer, keys: list[bytes]) -> None:
        """See `quire.kv.sharing.Promises`."""
        self.promised[handle] = set(keys)

    def settle(self, handle: int) -> None:
        """See `quire.kv.sharing.Promises`."""
        self.promised.pop(handle, None)


class MockCopies:
    """Runs the copy jobs of plans on the mock's memory.

    memory   [num_blocks + 1, ...] the device's blocks
    delays   number of steps after which a job ends, for one job after another; the sequence repeats
    below    the tiers below the host
    faults   fault of one job after another; the sequence repeats. "lost": no block comes; "half": the first ones come;
             "corrupt": blocks of a disk or peer are found to be wrong; "full": a disk takes no block
    """

    def __init__(
        self,
        memory: Memory,
        num_host_blocks: int,
        below: Mapping[Tier, MockDisk] | None = None,
        *,
        delays: Sequence[int] = (0,),
        faults: Sequence[str] = ("",),
    ) -> None:
        assert set(faults) <= set(FAULTS), f"unknown faults: {faults}"
        host = np.full((num_host_blocks + 1, *memory.shape[1:]), GARBAGE, np.uint64)
        self._blocks = {Tier.DEVICE: memory, Tier.HOST: host}
        self._below = dict(below or {})
        self._delays, self._faults = itertools.cycle(delays), itertools.cycle(faults)
        self._running: list[tuple[CopyJob, int]] = []

    def teach(self, host: Mapping[bytes, int], peers: MockPeers) -> None:
        """Give peers all blocks of the host tier: other engines have computed the same. `host`: key -> block."""
        peers.update({key: self._blocks[Tier.HOST][block].copy() for key, block in host.items()})

    def host_block(self, block: int) -> bytes:
        """Return the content of a host block."""
        content: bytes = self._blocks[Tier.HOST][block].tobytes()
        return content

    def begin(self, copies: StepCopies | None) -> None:
        """Begin the jobs of a plan, before its step writes anything."""
        for job in () if copies is None else (*copies.before, *copies.after):
            if job.target in self._blocks:
                self._blocks[job.target][job.targets] = GARBAGE
            self._running.append((job, next(self._delays)))

    def end(self) -> tuple[FinishedCopy, ...]:
        """End the jobs whose time has come, after a step, and return their reports."""
        ended = [job for job, left in self._running if left == 0]
        self._running = [(job, left - 1) for job, left in self._running if left]
        return tuple(map(self._copy, ended))

    def _copy(self, job: CopyJob) -> FinishedCopy:
        fault, count = next(self._faults), len(job.keys)
        far = job.source not in self._blocks
        good = {
            "lost": 0,
            "half": count // 2,
            "corrupt": count - far,
            "full": 0 if job.target == Tier.DISK else count,
        }.get(fault, count)
        failed = set(range(good, count))
        if fault == "corrupt" and far:
            self._below[job.source].discard(job.keys[i] for i in failed)
        for i, key in enumerate(job.keys[:good]):
            if far and key not in self._below[job.source]:
                failed.add(i)
                continue
            content = self._below[job.source][key] if far else self._blocks[job.source][job.sources[i]].copy()
            if job.target == Tier.DISK:
                self._below[job.target][key] = content
            else:
                self._blocks[job.target][job.targets[i]] = content
        error = "no space left" if fault == "full" and job.target == Tier.DISK else ""
        return FinishedCopy(id=job.id, failed=tuple(sorted(failed)), num_bytes=8 * (count - len(failed)), error=error)


class MockRanks:
    """Two ranks that each copy a half of every block, late and with faults of their own. See `MockCopies`."""

    def __init__(
        self,
        memory: Memory,
        num_host_blocks: int,
        below: Mapping[Tier, MockRanksDisk],
        *,
        delays: Sequence[int],
        faults: Sequence[str],
    ) -> None:
        half, self._reports = memory.shape[1] // 2, RankReports(2, joined_copies)
        self._ranks = [
            MockCopies(
                memory[:, rank * half : (rank + 1) * half],
                num_host_blocks,
                {tier: one.parts[rank] for tier, one in below.items()},
                delays=[*delays[3 * rank :], *delays],
                faults=[*faults[5 * rank :], *faults],
            )
            for rank in range(2)
        ]

    def begin(self, copies: StepCopies | None) -> None:
        """See `MockCopies`."""
        for rank in self._ranks:
            rank.begin(copies)

    def end(self) -> tuple[FinishedCopy, ...]:
        """See `MockCopies`."""
        return self._reports.join([report for rank in self._ranks for report in rank.end()])
