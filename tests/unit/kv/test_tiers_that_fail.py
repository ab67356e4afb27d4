"""A tier that takes, or gives, no blocks is left alone for a while, told once, and then tried again."""

from array import array

import pytest

from quire.contracts.blocks import KVGeometry
from quire.contracts.step import FinishedCopy, Tier
from quire.kv.hashing import KeyChain
from quire.kv.pool import BlockPool
from quire.kv.prefix import PrefixIndex
from quire.kv.store import FETCH_SECONDS, KVStore
from quire.kv.tiered_pool import DISK_PART, RETRY_SECONDS, BlockPlace

from .test_store import GROUP, Disk


def test_a_tier_that_does_not_answer_is_not_asked_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now, pool, disk = [0.0], BlockPool(8), Disk()
    store = KVStore(pool, KVGeometry(groups=(GROUP,)), num_host_blocks=8, below=(disk,), clock=lambda: now[0])
    chain = KeyChain(bytes(32), 4, array("I", [1] * 12))
    disk.update(chain.keys(3))
    index = PrefixIndex(pool, KVGeometry(groups=(GROUP,)))

    def fetch(handle: int, error: str) -> bool:
        if not store.fetch(handle, chain, 11, index.match(chain, 11)):
            return False
        copies = store.take_copies()
        assert copies is not None
        failed = (0, 1) if error else ()
        store.finished([FinishedCopy(id=copies.before[0].id, failed=failed, error=error)])
        assert store.take_ready() == ([handle], [])
        return True

    assert fetch(1, "it has not answered for 10 s")
    assert len(disk) == 3, "what cannot be read now is not thrown away"
    assert not fetch(2, "") and store.place(chain.keys(1)[0]) is BlockPlace.MISSING
    now[0] += RETRY_SECONDS
    assert fetch(3, "it has not answered for 10 s") and not fetch(4, "")
    assert caplog.text.count("gives no more blocks: it has not answered for 10 s") == 1
    now[0] += RETRY_SECONDS
    assert fetch(5, "") and "the disk tier gives blocks again" in caplog.text
    store.check()


def test_a_full_tier_is_written_again_when_there_is_room(caplog: pytest.LogCaptureFixture) -> None:
    now, pool, disk = [0.0], BlockPool(8), Disk()
    store = KVStore(
        pool, KVGeometry(groups=(GROUP,)), num_host_blocks=8, below=(disk,), write_through=True, clock=lambda: now[0]
    )

    def computed(number: int, error: str) -> bool:
        """Publish a block; return True if it is written to the disk, with this outcome."""
        (block,) = pool.take(1)
        pool.publish(block, bytes([number]) * 32)
        pool.release([block])
        written = False
        while (copies := store.take_copies()) is not None:
            (job,) = copies.after
            written |= job.target == Tier.DISK
            failing = error if job.target == Tier.DISK else ""
            disk.update(job.keys if job.target == Tier.DISK and not error else ())
            store.finished([FinishedCopy(id=job.id, failed=(0,) if failing else (), error=failing)])
        return written

    assert computed(1, "no space left")
    assert not computed(2, "")
    now[0] += RETRY_SECONDS
    assert computed(3, "no space left") and not computed(4, "")
    assert caplog.text.count("takes no more blocks: no space left") == 1
    now[0] += RETRY_SECONDS
    assert computed(5, "") and computed(6, "") and "the disk tier takes blocks again" in caplog.text
    store.check()


def test_a_file_that_hangs_costs_a_part_of_its_job() -> None:
    """The request gives up after a while; all other blocks have come, and the next requests find them."""
    now, num = [0.0], 3 * DISK_PART
    pool, disk = BlockPool(64), Disk()
    store = KVStore(pool, KVGeometry(groups=(GROUP,)), num_host_blocks=64, below=(disk,), clock=lambda: now[0])
    chain = KeyChain(bytes(32), 4, array("I", [1] * (4 * num + 1)))
    keys = chain.keys(num)
    disk.update(keys)
    index = PrefixIndex(pool, KVGeometry(groups=(GROUP,)))
    assert store.fetch(1, chain, 4 * num, index.match(chain, 4 * num))
    copies = store.take_copies()
    assert copies is not None and [len(job.keys) for job in copies.before] == [DISK_PART] * 3
    hung, *others = copies.before[::-1]  # the last part of the prompt
    store.finished([FinishedCopy(id=job.id) for job in others])
    now[0] += FETCH_SECONDS
    assert store.take_ready() == ([], [1])
    assert store.host.num_free == 64 - DISK_PART
    assert store.fetch(2, chain, 4 * num, index.match(chain, 4 * num)) == {
        block: (Tier.HOST, key) for block, key in enumerate(chain.keys(2 * DISK_PART))
    }
    for key in hung.keys:
        assert store.place(key) is BlockPlace.MISSING
    (block,) = store.host.take(1)
    store.host.publish(block, hung.keys[0])  # computed by the request, and stored
    assert store.place(hung.keys[0]) is BlockPlace.LOADABLE
    store.host.release([block])
    store.check()
