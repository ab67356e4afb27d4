"""Tiers of the checked executor: copies that end late, fail in part, or find nothing.

A copy happens as late as it may: when its job is reported. A block to be written holds garbage until then. So the mock
notices a request that reads a block too early, and a store whose device block was written meanwhile.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from quire.contracts.step import CopyJob, FinishedCopy, StepCopies, Tier
from quire.procs.ranks import CopyReports

GARBAGE = 0x5A5A5A5A5A5A5A5A
FAULTS = ("", "lost", "half", "corrupt", "full")
Memory = np.ndarray[Any, np.dtype[np.uint64]]


class MockDisk(dict[bytes, Memory]):
    """Blocks by key, as the disk tier of mock executors. Two executors may share it."""

    tier, takes = Tier.DISK, True

    def has(self, key: bytes) -> bool:
        """See `quire.kv.store.KeyedTier`."""
        return key in self

    def discard(self, keys: Iterable[bytes]) -> None:
        """See `quire.kv.store.KeyedTier`."""
        for key in keys:
            self.pop(key, None)


class MockRanksDisk:
    """Blocks by key, of which each of two ranks has a part. `tier`: PEER is never written to."""

    def __init__(self, tier: Tier = Tier.DISK, parts: Sequence[MockDisk] = ()) -> None:
        self.tier, self.takes, self.parts = tier, tier == Tier.DISK, parts or (MockDisk(), MockDisk())

    def has(self, key: bytes) -> bool:
        """See `quire.kv.store.KeyedTier`."""
        return all(key in part for part in self.parts)

    def discard(self, keys: Iterable[bytes]) -> None:
        """See `quire.kv.store.KeyedTier`."""
        for part in self.parts:
            part.discard(keys)

    def clear(self) -> None:
        """See `quire.kv.store.KeyedTier`."""
        for part in self.parts:
            part.clear()


class MockCopies:
    """Runs the copy jobs of plans on the mock's memory.

    memory   [num_blocks + 1, ...] the device's blocks
    delays   number of steps after which a job ends, for one job after another; the sequence repeats
    faults   fault of one job after another; the sequence repeats. "lost": no block comes; "half": the first ones come;
             "corrupt": blocks of a disk are found to be wrong; "full": a disk takes no block
    """

    def __init__(self, memory: Memory, num_host_blocks: int, disk: MockDisk | None = None, *,
                 delays: Sequence[int] = (0,), faults: Sequence[str] = ("",)) -> None:
        assert set(faults) <= set(FAULTS), f"unknown faults: {faults}"
        host = np.full((num_host_blocks + 1, *memory.shape[1:]), GARBAGE, np.uint64)
        self._blocks = {Tier.DEVICE: memory, Tier.HOST: host}
        self._disk = MockDisk() if disk is None else disk
        self._delays, self._faults = itertools.cycle(delays), itertools.cycle(faults)
        self._running: list[tuple[CopyJob, int]] = []

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
        good = {"lost": 0, "half": count // 2, "corrupt": count - far,
                "full": 0 if job.target == Tier.DISK else count}.get(fault, count)
        failed = set(range(good, count))
        if fault == "corrupt":
            self._disk.discard(job.keys[i] for i in failed)
        for i, key in enumerate(job.keys[:good]):
            if far and key not in self._disk:
                failed.add(i)
                continue
            content = self._disk[key] if far else self._blocks[job.source][job.sources[i]].copy()
            if job.target == Tier.DISK:
                self._disk[key] = content
            else:
                self._blocks[job.target][job.targets[i]] = content
        error = "no space left" if fault == "full" and job.target == Tier.DISK else ""
        return FinishedCopy(id=job.id, failed=tuple(sorted(failed)), num_bytes=8 * (count - len(failed)), error=error)


class MockRanks:
    """Two ranks that each copy a half of every block, late and with faults of their own. See `MockCopies`."""

    def __init__(self, memory: Memory, num_host_blocks: int, disk: MockRanksDisk, *, delays: Sequence[int],
                 faults: Sequence[str]) -> None:  # fmt: skip
        half, self._reports = memory.shape[1] // 2, CopyReports(2)
        self._ranks = [MockCopies(memory[:, rank * half : (rank + 1) * half], num_host_blocks, disk.parts[rank],
                                  delays=[*delays[3 * rank :], *delays], faults=[*faults[5 * rank :], *faults])
                       for rank in range(2)]  # fmt: skip

    def begin(self, copies: StepCopies | None) -> None:
        """See `MockCopies`."""
        for rank in self._ranks:
            rank.begin(copies)

    def end(self) -> tuple[FinishedCopy, ...]:
        """See `MockCopies`."""
        return self._reports.join([report for rank in self._ranks for report in rank.end()])
