"""Block tables of slots: admission, growth, publishing, and giving back."""

from array import array

import msgspec
import numpy as np
import pytest

from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.kv.allocator import KVAllocator
from quire.kv.hashing import KeyChain
from quire.kv.pool import BlockPool

SIZE = 4
GROUP = KVGroup(block_size=SIZE, layers=(0,), components=(KVComponent("k", 1, 8, "float32", 4),))
GEOMETRY = KVGeometry(groups=(GROUP,))


def allocator(num_blocks: int = 8, num_slots: int = 4) -> KVAllocator:
    return KVAllocator(BlockPool(num_blocks), GEOMETRY, num_slots=num_slots)


def chain(tokens) -> KeyChain:
    return KeyChain(bytes(32), SIZE, array("I", tokens))


def serve(alloc: KVAllocator, slot: int, tokens) -> np.ndarray:
    """Admit with matching and publish every full block, as a plan for a whole prompt does."""
    keys = chain(tokens)
    (ids,) = alloc.admit(slot, alloc.match(keys, len(tokens) - 1), len(tokens))
    alloc.publish(slot, keys, len(tokens) // SIZE)
    alloc.check()
    return ids


def test_admission_shares_the_prefix_and_takes_the_rest():
    alloc = allocator()
    first = serve(alloc, 0, range(10))
    assert first.dtype == np.int32 and first.tolist() == [1, 2, 3] == alloc.table(0)
    second = serve(alloc, 1, list(range(8)) + [50, 51, 52])
    assert second.tolist() == [1, 2, 4]
    assert alloc.capacity.tolist() == [12, 12, 0, 0] and alloc.capacity.dtype == np.int32
    assert alloc.published.tolist() == [2, 2, 0, 0] and alloc.num_blocks(1) == 3


def test_an_identical_prompt_reuses_all_but_the_block_of_its_last_token():
    alloc = allocator()
    serve(alloc, 0, range(8))
    match = alloc.match(chain(range(8)), 7)
    assert match.num_tokens == 4 and match.broke_at is None


def test_blocks_survive_their_request():
    alloc = allocator()
    serve(alloc, 0, range(10))
    alloc.free(0)
    assert alloc.pool.num_free == 8 and alloc.capacity[0] == 0 and alloc.table(0) == []
    assert alloc.match(chain(range(10)), 9).blocks == ([1, 2],)
    assert serve(alloc, 3, range(10)).tolist() == [1, 2, 3]


def test_can_admit_counts_matched_blocks_that_are_free():
    alloc = allocator(num_blocks=4)
    serve(alloc, 0, range(8))
    alloc.free(0)
    keys = chain(range(16))
    match = alloc.match(keys, 15)
    assert match.num_tokens == 8
    assert alloc.can_admit(match, 16)
    assert not alloc.can_admit(match, 17)
    assert not alloc.can_admit(match, 16, headroom=1) and alloc.can_admit(match, 12, headroom=1)
    alloc.admit(0, match, 16)
    assert alloc.pool.num_free == 0
    alloc.check()
    held = alloc.match(keys, 15)
    assert alloc.can_admit(held, 8) and not alloc.can_admit(held, 9)


def test_what_is_matched_is_not_evicted_for_the_rest_of_the_same_request():
    alloc = allocator(num_blocks=4)
    serve(alloc, 0, range(12))
    alloc.free(0)
    match = alloc.match(chain(range(8)), 8)
    ids = alloc.admit(0, match, 16)[0].tolist()
    assert (ids[:2],) == match.blocks and len(set(ids)) == 4
    alloc.check()


def test_a_stale_match_is_refused():
    alloc = allocator(num_blocks=2)
    serve(alloc, 0, range(8))
    alloc.free(0)
    match = alloc.match(chain(range(8)), 8)
    alloc.admit(0, alloc.match(chain([9]), 0), 8)
    with pytest.raises(AssertionError, match="dropped"):
        alloc.admit(1, match, 8)


def test_grow_gives_only_what_is_missing():
    alloc = allocator(num_blocks=4)
    serve(alloc, 0, range(5))
    assert alloc.grow(0, 8) == []
    assert alloc.grow(0, 9) == [(0, 0, 3)]
    assert alloc.capacity[0] == 12
    assert alloc.grow(0, 17) is None
    assert alloc.table(0) == [1, 2, 3] and alloc.pool.num_free == 1 and alloc.capacity[0] == 12
    alloc.check()


def test_grow_many_equals_growing_one_by_one():
    one, many = allocator(num_blocks=12), allocator(num_blocks=12)
    for alloc in (one, many):
        for slot, length in enumerate((4, 5, 8, 1)):
            serve(alloc, slot, range(slot * 100, slot * 100 + length))
    wanted = {3: 9, 0: 5, 1: 8, 2: 9}
    expected = [row for slot, num in wanted.items() for row in one.grow(slot, num) or []]
    rows = many.grow_many(np.array(list(wanted)), np.array(list(wanted.values())))
    assert rows is not None and rows.dtype == np.int32
    assert [tuple(row) for row in rows.tolist()] == expected and len(expected) == 4
    assert [many.table(slot) for slot in range(4)] == [one.table(slot) for slot in range(4)]
    assert many.capacity.tolist() == one.capacity.tolist()
    many.check()
    nothing = many.grow_many(np.array([0, 1]), np.array([2, 2]))
    assert nothing is not None and nothing.shape == (0, 3)


def test_grow_many_is_all_or_nothing():
    alloc = allocator(num_blocks=3)
    serve(alloc, 0, range(4))
    serve(alloc, 1, range(10, 14))
    assert alloc.grow_many(np.array([0, 1]), np.array([5, 5])) is None
    assert [alloc.table(0), alloc.table(1)] == [[1], [2]] and alloc.pool.num_free == 1
    assert alloc.capacity.tolist() == [4, 4, 0, 0]
    alloc.check()


def test_publishing_goes_on_where_it_stopped():
    alloc = allocator()
    tokens = array("I", range(6))
    keys = KeyChain(bytes(32), SIZE, tokens)
    alloc.admit(0, alloc.match(keys, 5), 6)
    alloc.publish(0, keys, 1)
    assert alloc.match(chain(range(8)), 8).blocks == ([1],)
    tokens.extend([6, 7])
    alloc.publish(0, keys, 2)
    alloc.publish(0, keys, 1)
    assert alloc.published[0] == 2
    assert alloc.match(chain(range(8)), 8).blocks == ([1, 2],)
    with pytest.raises(AssertionError):
        alloc.publish(0, keys, 3)


def test_content_computed_twice_is_findable_once():
    alloc = allocator()
    keys = [chain(range(4)), chain(range(4))]
    for slot in (0, 1):
        alloc.admit(slot, alloc.match(keys[slot], 3), 4)
    alloc.publish(0, keys[0], 1)
    alloc.publish(1, keys[1], 1)
    assert alloc.match(chain(range(5)), 4).blocks == ([1],)
    alloc.check()
    alloc.forget(1)
    assert alloc.match(chain(range(5)), 4).blocks == ([1],)
    alloc.check()


def test_a_failed_request_takes_back_only_what_it_published():
    alloc = allocator()
    serve(alloc, 0, range(8))
    serve(alloc, 1, range(16))
    alloc.forget(1)
    alloc.check()
    assert alloc.match(chain(range(16)), 16).blocks == ([1, 2],)
    assert alloc.pool.num_free == 6 and alloc.pool.num_cached == 0


def test_forgetting_keeps_the_blocks_of_those_who_share_them():
    alloc = allocator()
    serve(alloc, 0, range(8))
    serve(alloc, 1, range(9))
    alloc.forget(0)
    alloc.check()
    assert alloc.match(chain(range(9)), 8).blocks == ([],) and alloc.table(1)[:2] == [1, 2]
    assert alloc.pool.refs(1) == 1
    alloc.free(1)
    alloc.check()
    assert alloc.pool.num_cached == 0


def test_misuse_is_noticed():
    alloc = allocator()
    serve(alloc, 0, range(4))
    with pytest.raises(AssertionError, match="taken"):
        alloc.admit(0, alloc.match(chain([1]), 0), 1)
    for call in (alloc.free, alloc.forget, lambda slot: alloc.grow(slot, 1)):
        with pytest.raises(AssertionError, match="empty"):
            call(1)


def test_check_counts_references_from_elsewhere():
    alloc = allocator()
    serve(alloc, 0, range(4))
    alloc.pool.share([1])
    alloc.check(held=(1,))
    with pytest.raises(AssertionError, match="reference counts"):
        alloc.check()


# --- several groups -----------------------------------------------------------------------------------------------


def grouped(*windows: int | None, num_blocks: int = 40, num_slots: int = 4) -> KVAllocator:
    """An allocator of groups with these windows."""
    groups = tuple(msgspec.structs.replace(GROUP, window=window) for window in windows)
    geometry = KVGeometry(groups=groups)
    return KVAllocator(BlockPool(num_blocks), geometry, num_slots=num_slots)


def test_every_group_has_a_table_of_its_own():
    alloc = grouped(None, 6)
    full, window = alloc.admit(0, alloc.match(chain(range(10)), 9), 10)
    assert full.tolist() == [1, 2, 3] == alloc.table(0) and window.tolist() == [4, 5, 6] == alloc.table(0, 1)
    assert alloc.grow(0, 13) == [(0, 0, 7), (0, 1, 8)] and alloc.capacity[0] == 16
    alloc.check()
    alloc.free(0)
    alloc.check()


def test_a_window_takes_blocks_chunk_by_chunk_and_gives_back_what_it_has_passed():
    alloc = grouped(None, 6)
    keys = chain(range(20))
    full, window = alloc.admit(0, alloc.match(keys, 19), 20, 8)
    assert (len(full), len(window), alloc.capacity[0]) == (5, 2, 8)
    alloc.publish(0, keys, 2)
    alloc.trim(np.array([0]), np.array([8]))  # sees 3 to 8
    assert alloc.table(0, 1) == window.tolist()
    alloc.trim(np.array([0]), np.array([9]))
    assert alloc.table(0, 1) == [0, 7] and alloc.table(0) == full.tolist()
    assert alloc.pool.num_cached == 1, "it can be hit until it is needed"
    rows = alloc.grow_many(np.array([0]), np.array([17]))
    assert rows is not None and [(slot, group) for slot, group, _ in rows.tolist()] == [(0, 1)] * 3
    alloc.check()
    alloc.trim(np.array([0]), np.array([100]))
    assert alloc.table(0, 1) == [0] * 5
    alloc.check()
    alloc.free(0)
    alloc.check()


def test_chunks_give_back_their_blocks_when_the_next_one_begins():
    """Chunks of 6 tokens in blocks of 4: block 1 holds the end of a chunk and the beginning of the next."""
    alloc = grouped(None, -6)
    keys = chain(range(20))
    full, chunks = alloc.admit(0, alloc.match(keys, 19), 20, 8)
    assert (len(full), len(chunks)) == (5, 2)
    for position, held in ((5, [6, 7]), (6, [0, 7]), (11, [0, 7])):
        alloc.trim(np.array([0]), np.array([position]))
        assert alloc.table(0, 1) == held
    assert alloc.grow_many(np.array([0]), np.array([16])) is not None
    alloc.trim(np.array([0]), np.array([12]))
    assert alloc.table(0, 1)[:3] == [0, 0, 0] and alloc.table(0, 1)[3] and alloc.table(0) == full.tolist()
    alloc.check()


@pytest.mark.parametrize("windows", [(None, 6), (6, None), (None, None, 6)])
def test_a_hit_needs_of_a_window_only_what_later_rows_see(windows: tuple[int | None, ...]):
    alloc, at = grouped(*windows), windows.index(6)
    keys = chain(range(17))
    alloc.admit(0, alloc.match(keys, 16), 17)
    alloc.publish(0, keys, 4)
    tables = [list(alloc.table(0, group)) for group in range(len(windows))]
    alloc.free(0)
    match = alloc.match(chain(range(17)), 16)
    assert match.num_tokens == 16 and match.broke_at is None
    assert match.blocks == tuple([0, 0, *table[2:4]] if g == at else table[:4] for g, table in enumerate(tables))
    alloc.pool.forget(tables[at][:2])
    assert alloc.match(chain(range(17)), 16).num_tokens == 16, "nobody sees them any more"
    assert alloc.match(chain(range(17)), 8).num_tokens == 0, "rows from 8 on see from 3 on"
    alloc.pool.forget(tables[at][3:4])
    match = alloc.match(chain(range(17)), 16)
    assert (match.num_tokens, match.broke_at) == (0, 0), "12 to 15 are not there, and 7 to 11 need block 1"
    ids = alloc.admit(0, match, 17)
    assert all(ids[at]) and len(ids) == len(windows)
    alloc.check()


def test_a_hit_takes_only_what_it_needs():
    alloc = grouped(None, 6, num_blocks=12)
    keys = chain(range(17))
    alloc.admit(0, alloc.match(keys, 16), 17)
    alloc.publish(0, keys, 4)
    alloc.free(0)
    match = alloc.match(chain(range(17)), 16)
    full, window = alloc.admit(1, match, 17)
    assert window.tolist()[:2] == [0, 0] and all(window[2:]) and all(full)
    assert alloc.pool.num_free == 12 - 5 - 3
    alloc.check()
    alloc.forget(1)
    assert alloc.match(chain(range(17)), 16).num_tokens == 16, "what it shared stays"
    alloc.check()


def test_two_groups_never_take_each_others_blocks():
    """The same tokens, so the same key but for the group."""
    alloc = grouped(None, None)
    keys = chain(range(9))
    alloc.admit(0, alloc.match(keys, 8), 9)
    alloc.publish(0, keys, 2)
    first, second = alloc.match(chain(range(9)), 8).blocks
    assert first == alloc.table(0)[:2] and second == alloc.table(0, 1)[:2]


def test_admission_counts_the_window_and_the_chunk_in_flight():
    """A prompt of 40 tokens: all of its 10 blocks in full attention, 4 in a window of 6 with chunks of 6."""
    for free, fits in ((13, False), (14, True)):
        alloc = grouped(None, 6, num_blocks=free)
        match = alloc.match(chain(range(40)), 39)
        assert alloc.can_admit(match, 40, 0, 6) is fits
        assert alloc.most_blocks(40, 6) == 14
    alloc.admit(0, match, 40, 6)
    for start in range(6, 40, 6):  # and that is enough to the end, wherever chunks begin
        alloc.trim(np.array([0]), np.array([start]))
        assert alloc.grow(0, min(start + 6, 40)) is not None
    alloc.check()


def test_what_is_withdrawn_is_found_in_no_group():
    alloc = grouped(None, 6)
    keys = chain(range(17))
    alloc.admit(0, alloc.match(keys, 16), 17)
    alloc.publish(0, keys, 4)
    alloc.free(0)
    alloc.withdraw(keys)
    assert alloc.pool.num_cached == 0
    alloc.check()


def test_slots_that_begin_with_the_same_blocks_are_found():
    alloc = allocator(num_blocks=40, num_slots=8)
    one, other = list(range(5 * SIZE)), list(range(1000, 1000 + 5 * SIZE))
    own = (one, other, [*one[: 3 * SIZE], *[7] * SIZE], one, [9] * 3 * SIZE, other[: 2 * SIZE + 1])
    for slot, tokens in enumerate(own):
        serve(alloc, slot, tokens)
    assert alloc.shared_prefixes(range(8), 1) == [([0, 2, 3], 3), ([1, 5], 2)]
    assert alloc.shared_prefixes(range(8), 2 * SIZE + 1) == [([0, 2, 3], 3)]
    assert alloc.shared_prefixes([0, 3], 1) == [([0, 3], 4)]
    alloc.free(1)
    assert alloc.shared_prefixes(range(8), 1) == [([0, 2, 3], 3)]
