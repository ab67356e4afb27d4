"""Counts and maps of KV blocks by kind, for whoever looks at a running engine. Changes nothing.

own     one reference          shared   several references
cached  no reference, a key    free     no reference, no key
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from quire.contracts.blocks import NULL_BLOCK
from quire.kv.allocator import KVAllocator
from quire.kv.pool import BlockPool

LETTERS = np.frombuffer(b".cos", np.uint8)  # free, cached, own, shared


class Census(NamedTuple):
    """Blocks that slots hold.

    groups   (own, shared) of each KV group: blocks with one reference, and with several; each block counts once
    held     entries of each slot's tables, in the order of the slots, without those that a window has passed
    """

    groups: list[tuple[int, int]]
    held: list[int]


def census(allocator: KVAllocator, slots: Sequence[int], others: Iterable[int]) -> Census:
    """Return the blocks of all slots that hold some. O(blocks of the pool + entries of the tables), in arrays.

    others   blocks that are referenced, too, from elsewhere: by copies and loans (`KVStore.held`, `Loans.blocks`)
    """
    size = allocator.pool.num_blocks + 1
    beside = np.bincount(np.fromiter(others, np.int64), minlength=size)
    groups, held = [], [0] * len(slots)
    for group in range(len(allocator.groups)):
        tables = [allocator.table(slot, group) for slot in slots]
        lengths = [len(table) for table in tables]
        refs = np.bincount(np.fromiter(chain.from_iterable(tables), np.int64, sum(lengths)), minlength=size)
        if allocator.has_windows:
            lengths = [length - table.count(NULL_BLOCK) for length, table in zip(lengths, tables, strict=True)]
            refs[NULL_BLOCK] = 0
        own = int(np.count_nonzero((refs == 1) & (beside == 0)))
        groups.append((own, int(np.count_nonzero(refs)) - own))
        held = [a + b for a, b in zip(held, lengths, strict=True)]
    return Census(groups, held)


def pool_map(pool: BlockPool) -> str:
    """Return a letter for each block of a pool, block 1 first: "o" own, "s" shared, "c" cached, "." free."""
    refs = np.fromiter(map(pool.refs, range(pool.num_blocks + 1)), np.int32, pool.num_blocks + 1)
    kinds = np.where(refs > 0, np.minimum(refs, 2) + 1, 0)
    kinds[pool.next_evicted(pool.num_free)] = 1
    return bytes(LETTERS[kinds[1:]]).decode()
