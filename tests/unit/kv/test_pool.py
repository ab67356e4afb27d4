"""Order of reuse, reference counts, and what stays findable."""

import pytest

from quire.kv.pool import BlockPool


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def cached_pool(num_blocks: int = 4) -> BlockPool:
    """All blocks taken, block b published under key(b), nothing released."""
    pool = BlockPool(num_blocks)
    for block in pool.take(num_blocks):
        assert pool.publish(block, key(block))
    return pool


def test_starts_with_ascending_blocks_and_never_gives_the_reserved_one():
    pool = BlockPool(5)
    assert pool.num_free == 5
    assert pool.take(0) == []
    assert pool.take(2) + pool.take(3) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0
    with pytest.raises(AssertionError, match="free"):
        pool.take(1)
    pool.check()


def test_the_tail_of_a_sequence_is_evicted_before_its_head():
    pool = cached_pool(4)
    pool.release([2, 4, 1, 3])
    assert [pool.take(1)[0] for _ in range(4)] == [3, 1, 4, 2]
    assert pool.evictions == 4 and pool.num_cached == 0
    pool.check()


def test_the_least_recently_released_sequence_goes_first():
    pool = cached_pool(4)
    pool.release([1, 2])
    pool.release([3, 4])
    pool.share([1, 2])
    pool.release([1, 2])
    assert pool.take(4) == [4, 3, 2, 1]
    pool.check()


def test_blocks_without_a_key_are_used_before_keyed_ones():
    pool = BlockPool(4)
    first, second = pool.take(2), pool.take(2)
    pool.release(first)
    for block in second:
        pool.publish(block, key(block))
    pool.release(second)
    third = pool.take(1)
    pool.release(third)
    taken = pool.take(3)
    assert set(taken[:2]) == set(first) and taken[2] == second[1]
    assert pool.lookup(key(second[0])) == second[0] and pool.lookup(key(second[1])) is None
    assert pool.evictions == 1
    pool.check()


def test_a_released_block_is_hit_until_it_is_taken():
    pool = cached_pool(2)
    pool.release([1, 2])
    assert pool.lookup(key(1)) == 1 and pool.num_free == 2
    pool.share([1])
    assert pool.num_free == 1 and pool.refs(1) == 1 and pool.num_free_among([1, 2]) == 1
    assert pool.take(1) == [2]
    assert pool.lookup(key(2)) is None and pool.lookup(key(1)) == 1
    pool.check()


def test_shared_blocks_are_free_only_after_the_last_release():
    pool = cached_pool(2)
    pool.share([1])
    pool.release([1])
    assert pool.num_free == 0
    pool.release([1])
    assert pool.num_free == 1
    with pytest.raises(AssertionError, match="more often"):
        pool.release([1])


def test_a_blank_free_block_cannot_be_shared():
    pool = BlockPool(1)
    with pytest.raises(KeyError):
        pool.share([1])


def test_the_first_publisher_keeps_the_key():
    pool = BlockPool(2)
    pool.take(2)
    assert pool.publish(1, key(7))
    assert not pool.publish(2, key(7))
    assert pool.publish(1, key(7))
    assert pool.lookup(key(7)) == 1 and pool.key(2) is None
    pool.check()
    with pytest.raises(AssertionError, match="immutable"):
        pool.publish(1, key(8))


def test_a_free_block_cannot_be_published():
    with pytest.raises(AssertionError, match="not held"):
        BlockPool(1).publish(1, key(1))


def test_forget_drops_keys_of_held_and_free_blocks():
    pool = cached_pool(4)
    pool.release([1, 2])
    generation = pool.generation
    pool.forget([1, 3])
    assert [pool.lookup(key(block)) for block in (1, 2, 3, 4)] == [None, 2, None, 4]
    assert pool.generation > generation and pool.evictions == 0
    assert pool.take(1) == [1]
    pool.check()
    pool.forget([3])
    pool.release([3, 4])
    assert pool.num_cached == 2
    pool.check()


def test_reset_drops_everything_and_says_whether_blocks_are_in_use():
    pool = cached_pool(3)
    pool.release([1, 2])
    assert not pool.reset()
    assert pool.num_cached == 0 and pool.num_free == 2 and pool.refs(3) == 1
    assert all(pool.lookup(key(block)) is None for block in (1, 2, 3))
    pool.check()
    pool.release([3])
    assert pool.reset()
    pool.check()


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._refs.__setitem__(1, 0),
        lambda pool: pool._refs.__setitem__(3, 1),
        lambda pool: pool._blank.append(4),
        lambda pool: pool._keys.__setitem__(2, None),
        lambda pool: pool._index.pop(key(1)),
        lambda pool: pool._keys.__setitem__(3, key(1)),
        lambda pool: pool._cached.pop(2),
    ],
)
def test_check_notices(damage):
    pool = BlockPool(4)
    pool.take(2)
    pool.publish(1, key(1))
    pool.publish(2, key(2))
    pool.release([2])
    pool.check()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check()


def test_a_demoted_block_is_evicted_first_unless_somebody_holds_it():
    pool = BlockPool(3)
    blocks = pool.take(3)
    for block in blocks:
        pool.publish(block, bytes([block]))
    pool.demote(blocks[0])  # held: nothing happens
    pool.release(blocks)
    first, *_, last = pool.next_evicted(3)
    pool.demote(last)
    assert pool.next_evicted(3)[:2] == [last, first]
    pool.check()
