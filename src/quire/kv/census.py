"""Counts and maps of KV blocks by kind, for whoever looks at a running engine. Changes nothing.

own     one reference          shared   several references
cached  no reference, a key    free     no reference, no key
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quire.contracts.blocks import NULL_BLOCK
from quire.kv.allocator import KVAllocator
from quire.kv.pool import BlockPool

LETTERS = np.frombuffer(b".cos", np.uint8)  # free, cached, own, shared


class GroupCensus(NamedTuple):
    """Blocks that slots hold in a KV group: those with one reference, and those with several."""

    own: int
    shared: int


def census(allocator: KVAllocator, slots: Sequence[int]) -> list[GroupCensus]:
    """Return the blocks of `slots`, by group, each counted once. O(blocks that the slots hold)."""
    found = []
    for group in range(len(allocator.groups)):
        held = set[int]().union(*[allocator.table(slot, group) for slot in slots])
        held.discard(NULL_BLOCK)
        own = list(map(allocator.pool.refs, held)).count(1)
        found.append(GroupCensus(own, len(held) - own))
    return found


def num_held(allocator: KVAllocator, slot: int) -> int:
    """Return the entries of a slot's block tables, without those that a window has passed."""
    tables = [allocator.table(slot, group) for group in range(len(allocator.groups))]
    return sum([len(table) - (table.count(NULL_BLOCK) if allocator.has_windows else 0) for table in tables])


def pool_map(pool: BlockPool) -> str:
    """Return a letter for each block of a pool, block 1 first: "o" own, "s" shared, "c" cached, "." free."""
    refs = np.fromiter(map(pool.refs, range(pool.num_blocks + 1)), np.int32, pool.num_blocks + 1)
    kinds = np.where(refs > 0, np.minimum(refs, 2) + 1, 0)
    kinds[pool.next_evicted(pool.num_free)] = 1
    return bytes(LETTERS[kinds[1:]]).decode()
