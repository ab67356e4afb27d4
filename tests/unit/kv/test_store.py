"""Blocks that several tiers know by key: no tier gives a block that has been forgotten while it was written."""

from collections.abc import Iterable

import pytest

from quire.contracts.blocks import KVComponent, KVGroup
from quire.contracts.step import CopyJob, FinishedCopy, Tier
from quire.kv.pool import BlockPool
from quire.kv.store import BlockPlace, KVStore

KEY = bytes(32)
GROUP = KVGroup(layers=(0,), components=(KVComponent("k", num_heads=1, head_dim=1, dtype="uint8", item_bytes=1),))


class Disk(set[bytes]):
    """A disk whose thread has written a file before the engine core hears of it."""

    tier, takes = Tier.DISK, True

    def has(self, key: bytes) -> bool:
        return key in self

    def discard(self, keys: Iterable[bytes]) -> None:  # type: ignore[override]
        self.difference_update(keys)


def written() -> tuple[KVStore, Disk, BlockPool, CopyJob]:
    """A store whose only block was evicted from the device and is being written from the host to the disk."""
    pool, disk = BlockPool(2), Disk()
    store = KVStore(pool, (GROUP,), 4, num_host_blocks=2, below=(disk,), write_through=True)
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
