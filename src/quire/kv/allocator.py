"""Block tables of the running requests, one per slot, over one pool.

Decides which blocks a slot gets and which become findable by others. Knows nothing of queues, budgets or who is
preempted (`engine/`), nor of bytes (`kvstore/`). Called by one thread. A request's life here:

    match -> can_admit -> admit -> (publish | grow)* -> free | forget
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from quire.contracts.blocks import KVGeometry
from quire.contracts.errors import UnsupportedModel
from quire.contracts.step import I32
from quire.kv.hashing import KeyChain
from quire.kv.pool import BlockPool
from quire.kv.prefix import PrefixIndex, PrefixMatch

_GROUP = 0  # the only group; the second column of a plan's `appended`
Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]


class KVAllocator:
    """Gives blocks to slots 0..num_slots-1. Raises `UnsupportedModel` for a geometry of several groups.

    capacity    [num_slots] int32, tokens that a slot's blocks hold (0: the slot is empty); read only
    published   [num_slots] int32, leading blocks of a slot that are full and offered to others; read only
    """

    def __init__(self, pool: BlockPool, geometry: KVGeometry, *, num_slots: int) -> None:
        if len(geometry.groups) != 1:
            raise UnsupportedModel(
                f"the model needs {len(geometry.groups)} KV cache groups (layers of different windows); more than one "
                "is not implemented: choose a model whose layers all attend alike."
            )
        self.pool = pool
        self.block_size = geometry.block_size
        self.capacity: I32 = np.zeros(num_slots, np.int32)
        self.published: I32 = np.zeros(num_slots, np.int32)
        self._tables: list[list[int]] = [[] for _ in range(num_slots)]
        self._num_shared = [0] * num_slots  # leading blocks that came from a match
        self._index = PrefixIndex(pool, geometry.block_size)

    def match(self, chain: KeyChain, max_tokens: int) -> PrefixMatch:
        """The longest beginning of `chain` that is in the pool, at most `max_tokens` tokens; changes nothing."""
        return self._index.match(chain, max_tokens)

    def can_admit(self, match: PrefixMatch, num_tokens: int, headroom: int = 0) -> bool:
        """Whether `admit` would succeed and leave `headroom` free blocks; free blocks of the match count as taken."""
        missing = -(-num_tokens // self.block_size) - len(match.blocks)
        return self.pool.num_free - missing - headroom >= self.pool.num_free_among(match.blocks)

    def admit(self, slot: int, match: PrefixMatch, num_tokens: int) -> I32:
        """Fill an empty slot: the matched blocks, then new ones up to `num_tokens` tokens. All ids, int32, in order."""
        table = self._tables[slot]
        assert not table, f"slot {slot} is taken"
        assert num_tokens > 0 and num_tokens >= match.num_tokens, "a slot holds at least what was matched"
        assert not match.blocks or match.generation == self.pool.generation, "a key was dropped since the match"
        self.pool.share(match.blocks)  # before taking: nothing matched may be evicted
        table += match.blocks
        self._num_shared[slot] = len(match.blocks)
        table += self.pool.take(-(-num_tokens // self.block_size) - len(table))
        self.capacity[slot] = len(table) * self.block_size
        self.published[slot] = len(match.blocks)
        return np.array(table, np.int32)

    def grow(self, slot: int, num_tokens: int) -> list[int] | None:
        """New blocks so that the slot holds `num_tokens` tokens; None, and nothing changed, when the pool is short."""
        table = self._tables[slot]
        assert table, f"slot {slot} is empty"
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing <= 0:
            return []
        if missing > self.pool.num_free:
            return None
        taken = self.pool.take(missing)
        table += taken
        self.capacity[slot] = len(table) * self.block_size
        return taken

    def grow_many(self, slots: Ints, num_tokens: Ints) -> I32 | None:
        """`grow` of several different slots at once, as the [K, 3] int32 rows (slot, group, block) of a plan.

        slots, num_tokens   [S], the same order. None, and nothing changed, when the pool is short of any block: the
        caller then grows one by one and chooses whom to preempt.
        """
        short = num_tokens - self.capacity[slots]
        needy = np.flatnonzero(short > 0)
        if not needy.size:
            return np.empty((0, 3), np.int32)
        counts = -(-short[needy] // self.block_size)
        total = int(counts.sum())
        if total > self.pool.num_free:
            return None
        growing = slots[needy]
        rows = np.empty((total, 3), np.int32)
        rows[:, 0] = np.repeat(growing, counts)
        rows[:, 1] = _GROUP
        taken = self.pool.take(total)
        rows[:, 2] = taken
        tables = self._tables
        for slot, block in zip(rows[:, 0].tolist(), taken, strict=True):
            tables[slot].append(block)
        self.capacity[growing] += (counts * self.block_size).astype(np.int32)
        return rows

    def publish(self, slot: int, chain: KeyChain, num_full_blocks: int) -> None:
        """Offer the slot's first `num_full_blocks` blocks to others, those that are not offered yet.

        Their KV is, or by the plan being made will be, written before anyone attends to it.
        """
        start = int(self.published[slot])
        if num_full_blocks <= start:
            return
        table = self._tables[slot]
        assert num_full_blocks <= len(table), f"slot {slot} has {len(table)} blocks, not {num_full_blocks}"
        publish = self.pool.publish
        for block, key in zip(table[start:num_full_blocks], chain.keys(num_full_blocks, start), strict=True):
            publish(block, key)
        self.published[slot] = num_full_blocks

    def free(self, slot: int) -> None:
        """Give the slot's blocks back; what was published can be hit until its block is needed."""
        table = self._tables[slot]
        assert table, f"slot {slot} is empty"
        self.pool.release(table)
        self._tables[slot] = []
        self.capacity[slot] = self.published[slot] = self._num_shared[slot] = 0

    def forget(self, slot: int) -> None:
        """Free the slot of a failed request; no block that it published itself can be found any more.

        Also when its admission, growth or publishing broke off in the middle.
        """
        self.pool.forget(self._tables[slot][self._num_shared[slot] :])
        self.free(slot)

    def shared_prefixes(self, slots: Iterable[int], least: int) -> list[tuple[list[int], int]]:
        """Slots that begin with the same blocks, and how many: groups of two or more for which reading those blocks
        once saves at least `least` tokens. Slots that share the first block are one group, with what all of them share.
        """
        groups: dict[int, list[int]] = {}
        for slot in slots:
            if self._tables[slot] and self.pool.refs(self._tables[slot][0]) > 1:
                groups.setdefault(self._tables[slot][0], []).append(slot)
        found = []
        for members in groups.values():
            tables = [self._tables[slot] for slot in members]
            first, last = min(tables), max(tables)  # in order of ids; what these two share, all do
            shorter = min(len(first), len(last))
            same = next((i for i in range(shorter) if first[i] != last[i]), shorter)
            if same * self.block_size * (len(members) - 1) >= least:
                found.append((members, same))
        return found

    def num_blocks(self, slot: int) -> int:
        """Blocks that a slot holds."""
        return len(self._tables[slot])

    def table(self, slot: int) -> list[int]:
        """A slot's block ids, in order; the list itself, to be read only."""
        return self._tables[slot]

    def check(self, held: tuple[int, ...] = ()) -> None:
        """Assert every invariant of pool and tables; `held` lists blocks referenced from elsewhere, once per reference.

        O(num_blocks + blocks in tables): for tests and idle moments.
        """
        self.pool.check()
        refs = [0] * (self.pool.num_blocks + 1)
        for block in held:
            refs[block] += 1
        for slot, table in enumerate(self._tables):
            assert len(set(table)) == len(table), f"slot {slot} has a block twice"
            assert self.capacity[slot] == len(table) * self.block_size, f"capacity of slot {slot} is wrong"
            assert self._num_shared[slot] <= self.published[slot] <= len(table), f"slot {slot} published too much"
            for block in table:
                refs[block] += 1
        wrong = [block for block, count in enumerate(refs) if count != self.pool.refs(block)]
        assert not wrong, f"reference counts of blocks {wrong[:8]} are not the number of their holders"
