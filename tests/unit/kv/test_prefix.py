"""The longest reusable beginning: full blocks only, capped, up to the first miss."""

from array import array

import pytest

from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.kv.hashing import KeyChain
from quire.kv.pool import BlockPool
from quire.kv.prefix import PrefixIndex

ROOT = bytes(32)
SIZE = 4
GROUP = KVGroup(block_size=SIZE, layers=(0,), components=(KVComponent("k", 1, 8, "float32", 4),))


def chain(tokens, tags=()) -> KeyChain:
    return KeyChain(ROOT, SIZE, array("I", tokens), tags)


def index_of(*sequences, num_blocks: int = 400) -> tuple[BlockPool, PrefixIndex]:
    """A pool that holds all full blocks of the sequences, published in order."""
    pool = BlockPool(num_blocks)
    for tokens in sequences:
        keys = chain(tokens).keys(len(tokens) // SIZE)
        for block, key in zip(pool.take(len(keys)), keys, strict=True):
            pool.publish(block, key)
    return pool, PrefixIndex(pool, KVGeometry(groups=(GROUP,)))


def test_nothing_to_find():
    _, index = index_of()
    match = index.match(chain(range(9)), 8)
    assert (match.blocks, match.num_tokens, match.broke_at) == (([],), 0, 0)


def test_whole_blocks_up_to_the_limit():
    _, index = index_of(range(12))
    for limit, blocks, broke_at in [
        (100, [1, 2, 3], None),
        (12, [1, 2, 3], None),
        (11, [1, 2], None),
        (4, [1], None),
        (3, [], None),
        (0, [], None),
        (-1, [], None),
    ]:
        match = index.match(chain(range(12)), limit)
        assert (match.blocks, match.num_tokens, match.broke_at) == ((blocks,), SIZE * len(blocks), broke_at)


def test_the_first_miss_ends_the_walk():
    pool, index = index_of(range(20))
    pool.forget([3])
    match = index.match(chain(range(20)), 19)
    assert (match.blocks, match.num_tokens, match.broke_at) == (([1, 2],), 8, 8)


def test_equal_tokens_after_another_beginning_do_not_match():
    _, index = index_of([0] * 4 + [9] * 4)
    assert index.match(chain([1] * 4 + [9] * 4), 8).broke_at == 0
    assert index.match(chain([9] * 8), 8).blocks == ([],)
    assert index.match(chain([0] * 4 + [9] * 4, [("salt", "x")]), 8).blocks == ([],)


@pytest.mark.parametrize("common", [63, 64, 65, 130])
def test_long_prompts(common):
    _, index = index_of(range(common * SIZE))
    tokens = list(range(common * SIZE)) + [7] * 400
    probe = chain(tokens)
    match = index.match(probe, len(tokens) - 1)
    assert match.blocks == (list(range(1, common + 1)),) and match.broke_at == common * SIZE
    assert probe.num_hashed < len(probe.tokens) // probe.block_size  # a miss does not hash the rest of the prompt


def test_matching_changes_nothing():
    pool, index = index_of(range(8))
    pool.release([1, 2])
    before = (pool.num_free, pool.num_cached, pool.generation)
    index.match(chain(range(8)), 7)
    assert (pool.num_free, pool.num_cached, pool.generation) == before


def test_block_sizes_must_agree():
    _, index = index_of()
    with pytest.raises(AssertionError, match="block size"):
        index.match(KeyChain(ROOT, 8, array("I", range(8))), 8)
