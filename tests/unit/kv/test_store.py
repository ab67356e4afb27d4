"""Blocks that several tiers know by key: no tier gives a block that has been forgotten while it was written."""

from array import array
from collections.abc import Iterable
from pathlib import Path

import pytest

from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.contracts.step import CopyJob, DroppedFiles, FileNews, FinishedCopy, StepCopies, Tier
from quire.kv.hashing import KeyChain
from quire.kv.pool import BlockPool
from quire.kv.prefix import PrefixIndex
from quire.kv.store import KVStore
from quire.kv.tiered_pool import BlockPlace
from quire.kvstore.disk_tier import DiskTier

KEY = bytes(32)
GROUP = KVGroup(
    block_size=4, layers=(0,), components=(KVComponent("k", num_heads=1, head_dim=1, dtype="uint8", item_bytes=1),)
)


class Disk(set[bytes]):
    """A disk whose thread has written a file before the engine core hears of it."""

    tier, takes = Tier.DISK, True

    def has(self, key: bytes) -> bool:
        return key in self

    def holders(self, keys: Iterable[bytes]) -> tuple[int, ...]:
        return ()

    def holder(self, key: bytes) -> str:
        return ""

    def note_written(self, keys: Iterable[bytes]) -> None:
        assert set(keys) <= self

    def discard(self, keys: Iterable[bytes]) -> None:  # type: ignore[override]
        self.difference_update(keys)


def written() -> tuple[KVStore, Disk, BlockPool, CopyJob]:
    """A store whose only block was evicted from the device and is being written from the host to the disk."""
    pool, disk = BlockPool(2), Disk()
    store = KVStore(pool, KVGeometry(groups=(GROUP,)), num_host_blocks=2, below=(disk,), write_through=True)
    (block,) = pool.take(1)
    pool.publish(block, KEY)
    pool.release([block])
    copies = store.take_copies()
    assert copies is not None
    store.finished([FinishedCopy(id=copies.after[0].id)])
    copies = store.take_copies()
    assert copies is not None and copies.after[0].target == Tier.DISK
    pool.take(2)
    return store, disk, pool, copies.after[0]


@pytest.mark.parametrize("how", ["reset", "distrust"])
def test_a_file_is_not_found_that_was_written_after_its_block_was_forgotten(how: str) -> None:
    store, disk, pool, job = written()
    assert store.place(KEY) is BlockPlace.LOADABLE
    if how == "reset":
        pool.reset()
        store.reset()
    else:
        store.distrust([KEY])
    disk.add(KEY)  # by the thread, which knows nothing of that
    assert store.place(KEY) is BlockPlace.MISSING
    store.finished([FinishedCopy(id=job.id)])
    assert KEY not in disk and store.place(KEY) is BlockPlace.MISSING
    store.check()


def test_a_read_that_hangs_is_waited_for_once() -> None:
    """By a request, for a time; then the engine is idle, and the next request computes at once."""
    now, pool, disk = [0.0], BlockPool(8), Disk()
    store = KVStore(pool, KVGeometry(groups=(GROUP,)), num_host_blocks=8, below=(disk,), clock=lambda: now[0])
    chain = KeyChain(bytes(32), 4, array("I", [1] * 12))
    disk.update(chain.keys(3))
    index = PrefixIndex(pool, KVGeometry(groups=(GROUP,)))
    assert store.fetch(1, chain, 11, index.match(chain, 11)) == {
        block: (Tier.DISK, key) for block, key in enumerate(chain.keys(2))
    }
    copies = store.take_copies()
    assert copies is not None and store.busy(writes=False)
    now[0] = 11.0
    assert store.take_ready() == ([], [1])
    store.take_copies()
    assert not store.busy(writes=False) and not store.fetch(2, chain, 11, index.match(chain, 11))
    store.finished([FinishedCopy(id=copies.before[0].id)])  # after all
    assert store.place(chain.keys(1)[0]) is BlockPlace.LOADABLE
    store.check()


@pytest.mark.parametrize("write_through", [False, True])
@pytest.mark.parametrize("leases", [0, 2, 8])
def test_an_idle_engine_copies_nothing_whatever_is_leased(leases: int, write_through: bool) -> None:
    """Leased blocks leave less room for those that the next steps may evict."""
    pool = BlockPool(32)
    store = KVStore(pool, KVGeometry(groups=(GROUP,)), num_host_blocks=16, reserve=12, write_through=write_through)

    def step() -> int:
        copies = store.take_copies()
        jobs = () if copies is None else copies.before + copies.after
        store.finished([FinishedCopy(id=job.id) for job in jobs])
        return sum(len(job.keys) for job in jobs)

    for number in range(16):
        chain = KeyChain(bytes(32), 4, array("I", [number] * 8))
        blocks = pool.take(2)
        for block, key in zip(blocks, chain.keys(2), strict=True):
            pool.publish(block, key)
        step()
        if number >= 16 - leases:
            store.sharing.keep(f"lease {number}", chain, 2)
        pool.release(blocks)
        for _ in range(3):
            step()
    steps = 0
    while store.busy(writes=False) and steps < 20:
        step()
        steps += 1
    assert steps < 20
    store.check()


def test_device_blocks_are_told_when_a_job_has_read_or_written_them() -> None:
    """Not before: a block is published when the step that computes it is planned."""
    pool, told = BlockPool(3), list[tuple[int, bytes]]()
    store = KVStore(pool, KVGeometry(groups=(GROUP,)), num_host_blocks=3, write_through=True)
    store.on_whole.append(lambda block, key: told.append((block, key)))
    blocks, keys = pool.take(3), [bytes([i]) * 32 for i in range(3)]
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block, key)
    copies = store.take_copies()
    assert copies is not None and not told
    pool.forget(blocks[:1])
    store.finished([FinishedCopy(id=copies.after[0].id, failed=(1,))])
    assert told == [(blocks[2], keys[2])], "the first was dropped, the second could not be copied"


def test_a_block_of_another_gpu_comes_to_the_device_at_once() -> None:
    class Devices(Disk):
        tier, takes = Tier.CUDA_IPC, False

        def holders(self, keys: Iterable[bytes]) -> tuple[int, ...]:
            return tuple(5 for _ in keys)

        def holder(self, key: bytes) -> str:
            return "a peer"

    pool, devices, told = BlockPool(2), Devices(), list[bytes]()
    store = KVStore(pool, KVGeometry(groups=(GROUP,)), num_host_blocks=2, below=(Disk(), devices))
    store.on_whole.append(lambda block, key: told.append(key))
    chain = KeyChain(bytes(32), 4, array("I", range(5)))
    (key,) = chain.keys(1)
    devices.add(key)
    match = PrefixIndex(pool, KVGeometry(groups=(GROUP,))).match(chain, 4)
    assert store.fetch(7, chain, 4, match) == {0: (Tier.CUDA_IPC, chain.keys(1)[0])}
    assert [store.holder(tier, key) for tier in (Tier.CUDA_IPC, Tier.DISK, Tier.HOST)] == ["a peer", "", ""]
    copies = store.take_copies()
    assert copies is not None
    (job,) = copies.before
    assert (job.source, job.target, job.sources.tolist()) == (Tier.CUDA_IPC, Tier.DEVICE, [5])
    assert store.place(key) is BlockPlace.PENDING and store.held() == job.targets.tolist()
    store.finished([FinishedCopy(id=job.id, num_bytes=9)])
    assert store.place(key) is BlockPlace.RESIDENT and store.take_ready() == ([7], []) and told == [key]
    assert store.counters()[Tier.CUDA_IPC].loaded_bytes == 9 and store.host.num_free == 2
    store.check()


def test_files_on_other_hosts_come_with_results_and_go_with_plans(tmp_path: Path) -> None:
    """A step goes out for them alone, so that an idle engine deletes, too."""
    disk = DiskTier(tmp_path, bytes(32), {0: "here", 1: "there"}, [FileNews(rank=0), FileNews(rank=1, came=(KEY,))])
    store = KVStore(BlockPool(4), KVGeometry(groups=(GROUP,)), num_host_blocks=2, below=(disk,), clock=lambda: 0.0)
    store.hosted[False] = disk
    assert store.place(KEY) is BlockPlace.MISSING, "one host lacks the block"
    store.finished((), (FileNews(rank=0, came=(KEY,)),))
    assert store.place(KEY) is BlockPlace.LOADABLE and not store.busy(writes=False) and store.take_copies() is None
    store.distrust([KEY])
    assert store.place(KEY) is BlockPlace.MISSING and store.busy(writes=False)
    assert store.take_copies() == StepCopies(dropped=(DroppedFiles(keys=(KEY,)),))
    store.reset()
    assert store.take_copies() == StepCopies(dropped=(DroppedFiles(every=True),)) and not store.busy(writes=False)
