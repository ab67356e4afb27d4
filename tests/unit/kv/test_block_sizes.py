"""KV groups whose blocks differ in tokens: admission, growth, hits at common boundaries, keys, leases."""

import random
from array import array

import numpy as np
import pytest

from quire.contracts.blocks import NULL_BLOCK, KVComponent, KVGeometry, KVGroup
from quire.kv.allocator import KVAllocator
from quire.kv.hashing import KeyChain, group_keys, namespace_digest
from quire.kv.pool import BlockPool
from quire.kv.prefix import PrefixIndex
from quire.kv.store import KVStore

COMPONENT = KVComponent("k", 1, 8, "float32", 4)
SIZES = [(16, 32), (32, 16), (32, 64), (32, 128), (16, 32, 128)]


def geometry(sizes: tuple[int, ...], windows: tuple[int | None, ...] = ()) -> KVGeometry:
    groups = (
        KVGroup(layers=(i,), components=(COMPONENT,), window=window, block_size=size)
        for i, (size, window) in enumerate(zip(sizes, windows or (None,) * len(sizes), strict=True))
    )
    return KVGeometry(groups=tuple(groups))


def chain(tokens, size: int) -> KeyChain:
    return KeyChain(bytes(32), size, array("I", tokens))


def test_sizes_of_a_geometry():
    found = geometry((32, 64, 48))
    assert (found.block_size, found.hit_size, found.block_sizes) == (16, 192, (32, 64, 48))
    assert geometry((32, 32)).num_tokens(10) == 320 and geometry((32, 64)).num_tokens(9) == 384
    assert geometry((64, 32), (8, None)).shared_size == 32 and geometry((64,), (8,)).shared_size is None


@pytest.mark.parametrize("sizes", SIZES)
def test_each_group_takes_the_blocks_of_its_own_size(sizes: tuple[int, ...]):
    layout = geometry(sizes)
    alloc = KVAllocator(BlockPool(64), layout, num_slots=2)
    keys = chain(range(200), layout.block_size)
    match = alloc.match(keys, 199)
    assert match.num_tokens == 0 and alloc.can_admit(match, 200)
    ids = alloc.admit(0, match, 200)
    assert [len(blocks) for blocks in ids] == [-(-200 // size) for size in sizes]
    assert alloc.capacity[0] == min(-(-200 // size) * size for size in sizes)
    alloc.publish(0, keys, 200 // layout.block_size)
    alloc.check()
    grown = alloc.grow(0, 300)
    assert grown is not None
    counts = [sum(group == one for _, group, _ in grown) for one in range(len(sizes))]
    assert counts == [-(-300 // size) - -(-200 // size) for size in sizes]
    alloc.check()


def test_admission_counts_the_blocks_of_every_group():
    alloc = KVAllocator(BlockPool(10), geometry((16, 32)), num_slots=1)
    assert alloc.most_blocks(112, 16) == 7 + 4 and alloc.most_blocks(96, 16) == 6 + 3
    nothing = alloc.match(chain(range(112), 16), 0)
    assert alloc.can_admit(nothing, 96) and not alloc.can_admit(nothing, 97) and not alloc.can_admit(nothing, 96, 2)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_hit_ends_where_the_blocks_of_all_groups_end(sizes: tuple[int, ...]):
    layout = geometry(sizes)
    alloc, tokens = KVAllocator(BlockPool(90), layout, num_slots=3), list(range(300))
    first = chain(tokens, layout.block_size)
    mine = alloc.admit(0, alloc.match(first, 299), 300)
    alloc.publish(0, first, 300 // layout.block_size)
    for length in (300, 257, 255, 129, 40, 7):
        match = alloc.match(chain(tokens[:length], layout.block_size), length - 1)
        assert match.num_tokens == (length - 1) // layout.hit_size * layout.hit_size and match.broke_at is None
        assert match.blocks == tuple(
            ids.tolist()[: match.num_tokens // size] for ids, size in zip(mine, sizes, strict=True)
        )
    alloc.pool.forget([int(mine[0][256 // sizes[0] - 1])])  # the last block of the first 256 tokens
    match = alloc.match(chain(tokens, layout.block_size), 299)
    assert match.num_tokens == match.broke_at == 256 - layout.hit_size


@pytest.mark.parametrize("size", [1, 4, 6, 16])
@pytest.mark.parametrize("window", [1, 5, 12, 16, -1, -5, -12, -16, -32])
def test_the_most_blocks_of_a_group_are_those_of_its_worst_position(size: int, window: int):
    """Counted position by position, for every number of tokens in unfinished steps."""
    group = KVGroup(layers=(0,), components=(COMPONENT,), block_size=size, window=window)
    for chunk in (1, 2, 7, 16, 50):
        first = {p: max(0, p - window + 1) if window > 0 else p // -window * -window for p in range(300)}
        held = [-(-(p + chunk) // size) - first[p] // size for p in first]
        assert group.most_blocks(1000, chunk) == max(held)
        assert all(group.num_behind(p) == first[p] // size for p in first)
    assert group.most_blocks(3, 50) == -(-3 // size)


@pytest.mark.parametrize("window", [40, -40, -48, -64])
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (16, 64), (64, 16)])
def test_a_window_of_another_block_size_is_searched_at_common_boundaries(sizes: tuple[int, int], window: int):
    """The closed form: a prefix of n tokens is found if full attention has [0, n) and the window [n - 39, n).

    Of attention in chunks it must have the chunk of token n, up to n: nothing if n begins a chunk.
    """
    layout = geometry(sizes, (None, window))
    rng, seen = random.Random(0), set[int]()
    for _ in range(300):
        pool, tokens = BlockPool(80), range(321)
        keys = chain(tokens, layout.block_size)
        held = list[set[int]]()
        for group, size in enumerate(sizes):
            blocks = pool.take(320 // size)
            share = rng.choice([1.0, 0.95, 0.7])
            here = {i for i in range(len(blocks)) if rng.random() < share}
            for index in here:
                pool.publish(blocks[index], group_keys(keys, group, size, index + 1, index)[0])
            held.append({index * size + at for index in here for at in range(size)})
        match = PrefixIndex(pool, layout).match(keys, 320)
        good = [
            n
            for n in range(0, 321, layout.hit_size)
            if held[0] >= set(range(n))
            and held[1] >= set(range(max(0, n - window + 1) if window > 0 else n // -window * -window, n))
        ]
        assert match.num_tokens == max(good)
        passed = layout.groups[1].num_behind(match.num_tokens)
        assert match.blocks[1][:passed] == [NULL_BLOCK] * passed and all(match.blocks[1][passed:])
        assert [len(blocks) * size for blocks, size in zip(match.blocks, sizes, strict=True)] == [match.num_tokens] * 2
        seen.add(match.num_tokens)
    assert len(seen) > 4


def test_trim_gives_back_by_the_size_of_the_group():
    alloc = KVAllocator(BlockPool(40), geometry((32, 16), (None, 20)), num_slots=1)
    keys = chain(range(200), 16)
    alloc.admit(0, alloc.match(keys, 0), 200)
    alloc.trim(np.array([0]), np.array([100]))
    assert alloc.table(0, 1)[:5] == [0] * 5 and all(alloc.table(0, 1)[5:]) and all(alloc.table(0, 0))
    alloc.check()


def test_keys_of_a_larger_block_name_all_of_its_tokens():
    tokens = list(range(128))
    keys = chain(tokens, 32)
    own = group_keys(keys, 1, 64, 2)
    assert own == [keys.keys(4)[1] + b"\x01", keys.keys(4)[3] + b"\x01"] and group_keys(keys, 1, 64, 2, 1) == own[1:]
    assert len({*own, *group_keys(keys, 0, 32, 4)}) == 6
    for at in (0, 31, 32, 63):  # any other token of the block is another key
        changed = [*tokens[:at], 999, *tokens[at + 1 :]]
        assert group_keys(chain(changed, 32), 1, 64, 1) != own[:1]


def test_engines_with_other_block_sizes_share_no_key():
    digests = {
        namespace_digest(model="m", revision="", dtype="float32", block_size=32, geometry=geometry(sizes))
        for sizes in ((32, 32), (32, 64), (64, 32), (32, 128))
    }
    assert len(digests) == 4


def test_what_is_withdrawn_is_found_in_no_group():
    """From block 3 of the chain on: the larger block that holds blocks 2 and 3 goes, too."""
    alloc = KVAllocator(BlockPool(40), geometry((16, 32)), num_slots=1)
    keys = chain(range(128), 16)
    alloc.admit(0, alloc.match(keys, 0), 128)
    alloc.publish(0, keys, 8)
    alloc.withdraw(keys, 3)
    lookup = alloc.pool.lookup
    assert [lookup(key) is not None for key in group_keys(keys, 0, 16, 8)] == [True] * 3 + [False] * 5
    assert [lookup(key) is not None for key in group_keys(keys, 1, 32, 4)] == [True, False, False, False]


def test_a_lease_keeps_the_blocks_of_every_group():
    layout, pool = geometry((16, 32)), BlockPool(20)
    store = KVStore(pool, layout, num_host_blocks=20)
    alloc = KVAllocator(pool, layout, num_slots=1)
    keys = chain(range(80), 16)
    alloc.admit(0, alloc.match(keys, 0), 80)
    alloc.publish(0, keys, 5)
    store.sharing.keep("mine", keys, int(alloc.published[0]))
    copies = store.take_copies()
    assert copies is not None
    (job,) = copies.after
    assert set(job.keys) == {*group_keys(keys, 0, 16, 5), *group_keys(keys, 1, 32, 2)}
