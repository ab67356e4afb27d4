"""Block tables of the running requests, one per KV group and slot, over one pool: the groups' pages are equal.

Decides which blocks a slot gets and which become findable by others. Knows nothing of queues, budgets or who is
preempted (`engine/`), nor of bytes (`kvstore/`). Called by one thread. A request's life here:

    match -> can_admit -> admit -> (publish | trim | grow)* -> free | forget

A group of full attention keeps all blocks of a request, and all for its prompt are taken at its admission. A group with
a window keeps those that rows to come can see: others are given back by `trim`, and blocks come chunk by chunk.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from quire.contracts.blocks import NULL_BLOCK, KVGeometry
from quire.contracts.step import I32
from quire.kv.hashing import KeyChain, group_key
from quire.kv.pool import BlockPool
from quire.kv.prefix import PrefixIndex, PrefixMatch

Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]


class KVAllocator:
    """Gives blocks to slots 0..num_slots-1.

    capacity    [num_slots] int32, tokens that a slot's blocks hold in every group (0: the slot is empty); read only
    published   [num_slots] int32, leading blocks of a slot that are full and offered to others; read only
    has_windows whether any group gives blocks back before a request ends: `trim` has something to do
    """

    def __init__(self, pool: BlockPool, geometry: KVGeometry, *, num_slots: int) -> None:
        self.pool = pool
        self.block_size = geometry.block_size
        self.capacity: I32 = np.zeros(num_slots, np.int32)
        self.published: I32 = np.zeros(num_slots, np.int32)
        self._groups = geometry.groups
        self._windows = [g for g, group in enumerate(geometry.groups) if group.window is not None]
        self.has_windows = bool(self._windows)
        self._tables: list[list[list[int]]] = [[[] for _ in range(num_slots)] for _ in geometry.groups]
        self._behind = [[0] * num_slots for _ in geometry.groups]  # leading entries given back: NULL_BLOCK
        self._num_shared = [0] * num_slots  # leading blocks of each group that came from a match
        self._index = PrefixIndex(pool, geometry.block_size, geometry.groups)

    def match(self, chain: KeyChain, max_tokens: int) -> PrefixMatch:
        """The longest beginning of `chain` that is in the pool, at most `max_tokens` tokens; changes nothing."""
        return self._index.match(chain, max_tokens)

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """Blocks that a request of so many tokens needs at most at one time, `chunk` tokens being in flight."""
        whole = -(-num_tokens // self.block_size)
        windows = sum(min(whole, self._peak(group, chunk)) for group in self._windows) if self.has_windows else 0
        return whole * (len(self._groups) - len(self._windows)) + windows

    def can_admit(self, match: PrefixMatch, num_tokens: int, headroom: int = 0, upto: int | None = None) -> bool:
        """Whether `admit` would succeed and leave `headroom` free blocks; free blocks of the match count as taken.

        What a window takes later, for chunks behind the first, must be there as well.
        """
        whole, held = -(-num_tokens // self.block_size), match.blocks[0]
        missing = (whole - len(held)) * (len(self._groups) - len(self._windows))
        for group in self._windows:
            blocks = match.blocks[group]
            peak = self._peak(group, (num_tokens if upto is None else upto) - match.num_tokens)
            missing += min(whole, blocks.count(NULL_BLOCK) + peak) - len(blocks)
        if len(self._groups) > 1:
            held = [block for blocks in match.blocks for block in blocks if block]
        return self.pool.num_free - missing - headroom >= self.pool.num_free_among(held)

    def _peak(self, group: int, chunk: int) -> int:
        """Blocks that a group with a window holds for a chunk and what its first row sees, wherever they begin."""
        window = self._groups[group].window
        assert window is not None
        return (window + chunk - 3) // self.block_size + 2

    def admit(self, slot: int, match: PrefixMatch, num_tokens: int, upto: int | None = None) -> tuple[I32, ...]:
        """Fill an empty slot: the matched blocks, then new ones up to `num_tokens` tokens, and of a window up to `upto`
        (None: all), where the first chunk ends. All ids of each group, int32, in order."""
        count, pool = len(match.blocks[0]), self.pool
        assert not self._tables[0][slot], f"slot {slot} is taken"
        assert num_tokens > 0 and num_tokens >= match.num_tokens, "a slot holds at least what was matched"
        assert not count or match.generation == pool.generation, "a key was dropped since the match"
        for group in self._windows:
            self._behind[group][slot] = match.blocks[group].count(NULL_BLOCK)
        for tables, blocks in zip(self._tables, match.blocks, strict=True):
            pool.share([block for block in blocks if block] if self.has_windows else blocks)  # else they may be evicted
            tables[slot] += blocks
        self._num_shared[slot] = count
        whole = chunk = -(-num_tokens // self.block_size)
        if self.has_windows:
            chunk = whole if upto is None else -(-upto // self.block_size)
        ids = []
        for group, tables in enumerate(self._tables):
            table = tables[slot]
            table += pool.take((chunk if group in self._windows else whole) - count)
            ids.append(np.array(table, np.int32))
        self.capacity[slot] = chunk * self.block_size
        self.published[slot] = count
        return tuple(ids)

    def grow(self, slot: int, num_tokens: int) -> list[tuple[int, int, int]] | None:
        """New blocks so that the slot holds `num_tokens` tokens, as rows (slot, group, block); None, and nothing
        changed, when the pool is short."""
        assert self._tables[0][slot], f"slot {slot} is empty"
        rows = self.grow_many(np.array([slot]), np.array([num_tokens]))
        return None if rows is None else [(slot, group, block) for _, group, block in rows.tolist()]

    def grow_many(self, slots: Ints, num_tokens: Ints) -> I32 | None:
        """`grow` of several different slots at once, as the [K, 3] int32 rows (slot, group, block) of a plan.

        slots, num_tokens   [S], the same order. None, and nothing changed, when the pool is short of any block: the
        caller then grows one by one and chooses whom to preempt.
        """
        needy = np.flatnonzero(num_tokens > self.capacity[slots])
        if not needy.size:
            return np.empty((0, 3), np.int32)
        growing, counts = slots[needy], -(-num_tokens[needy] // self.block_size)
        wanted = list(zip(growing.tolist(), counts.tolist(), strict=True))
        short: list[tuple[int, int, list[int]]] = []  # slot, group and table of each block to come
        for group, tables in enumerate(self._tables):
            for slot, count in wanted:
                table = tables[slot]
                short += [(slot, group, table)] * (count - len(table))
        if len(short) > self.pool.num_free:
            return None
        taken = self.pool.take(len(short))
        for (_, _, table), block in zip(short, taken, strict=True):
            table.append(block)
        self.capacity[growing] = counts * self.block_size  # as far as the group that was short
        rows = np.empty((len(short), 3), np.int32)
        rows[:, 0] = [slot for slot, _, _ in short]
        rows[:, 1] = [group for _, group, _ in short] if len(self._tables) > 1 else 0
        rows[:, 2] = taken
        return rows

    def trim(self, slots: Ints, positions: Ints) -> None:
        """Give back the blocks that no row of `slots` [S] at `positions` [S] or later sees. What was published of them
        can be hit until they are needed; a step that is in flight reads them before the next one writes."""
        for group in self._windows:
            for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
                before, table = self._behind[group][slot], self._tables[group][slot]
                behind = min(self._groups[group].num_behind(position, self.block_size), len(table))
                if behind > before:
                    self.pool.release(table[before:behind])
                    table[before:behind] = [NULL_BLOCK] * (behind - before)
                    self._behind[group][slot] = behind

    def publish(self, slot: int, chain: KeyChain, num_full_blocks: int) -> None:
        """Offer the slot's first `num_full_blocks` blocks to others, those that are not offered yet.

        Their KV is, or by the plan being made will be, written before anyone attends to it.
        """
        start = int(self.published[slot])
        if num_full_blocks <= start:
            return
        publish, keys = self.pool.publish, chain.keys(num_full_blocks, start)
        for group, tables in enumerate(self._tables):
            table = tables[slot]
            assert num_full_blocks <= len(table), f"slot {slot} has {len(table)} blocks, not {num_full_blocks}"
            for block, key in zip(table[start:num_full_blocks], keys, strict=True):
                publish(block, group_key(key, group) if group else key)
        self.published[slot] = num_full_blocks

    def withdraw(self, chain: KeyChain) -> None:
        """Nobody may find the blocks of `chain` any more, whoever holds them."""
        keys = chain.keys(chain.num_hashed)
        found = [self.pool.lookup(group_key(key, group)) for group in range(len(self._groups)) for key in keys]
        self.pool.forget([block for block in found if block is not None])

    def free(self, slot: int) -> None:
        """Give the slot's blocks back; what was published can be hit until its block is needed."""
        assert self._tables[0][slot], f"slot {slot} is empty"
        for tables, behind in zip(self._tables, self._behind, strict=True):
            self.pool.release(tables[slot][behind[slot] :] if behind[slot] else tables[slot])
            tables[slot], behind[slot] = [], 0
        self.capacity[slot] = self.published[slot] = self._num_shared[slot] = 0

    def forget(self, slot: int) -> None:
        """Free the slot of a failed request; no block that it published itself can be found any more.

        Also when its admission, growth or publishing broke off in the middle.
        """
        for tables in self._tables:
            self.pool.forget(tables[slot][self._num_shared[slot] :])
        self.free(slot)

    def shared_prefixes(self, slots: Iterable[int], least: int) -> list[tuple[list[int], int]]:
        """Slots that begin with the same blocks, and how many: groups of two or more for which reading those blocks
        once saves at least `least` tokens. Slots that share the first block are one group, with what all of them share.

        By the first group of full attention: what slots share came from matches, which are the same in all of them.
        """
        if len(self._windows) == len(self._groups):
            return []
        whole = next(self._tables[g] for g, group in enumerate(self._groups) if group.window is None)
        groups: dict[int, list[int]] = {}
        for slot in slots:
            if whole[slot] and self.pool.refs(whole[slot][0]) > 1:
                groups.setdefault(whole[slot][0], []).append(slot)
        found = []
        for members in groups.values():
            tables = [whole[slot] for slot in members]
            first, last = min(tables), max(tables)  # in order of ids; what these two share, all do
            shorter = min(len(first), len(last))
            same = next((i for i in range(shorter) if first[i] != last[i]), shorter)
            if same * self.block_size * (len(members) - 1) >= least:
                found.append((members, same))
        return found

    def num_blocks(self, slot: int) -> int:
        """Entries of a slot's block table; 0: it holds nothing."""
        return len(self._tables[0][slot])

    def table(self, slot: int, group: int = 0) -> list[int]:
        """A slot's block ids in a group, in order; the list itself, to be read only."""
        return self._tables[group][slot]

    def check(self, held: tuple[int, ...] = ()) -> None:
        """Assert every invariant of pool and tables; `held` lists blocks referenced from elsewhere, once per reference.

        O(num_blocks + blocks in tables): for tests and idle moments.
        """
        self.pool.check()
        refs = [0] * (self.pool.num_blocks + 1)
        for block in held:
            refs[block] += 1
        for slot, capacity in enumerate(self.capacity.tolist()):
            tables = [tables[slot] for tables in self._tables]
            assert capacity == min(map(len, tables)) * self.block_size, f"capacity of slot {slot} is wrong"
            assert self._num_shared[slot] <= self.published[slot] <= min(map(len, tables)), f"{slot} published too much"
            for group, table in enumerate(tables):
                behind = self._behind[group][slot]
                assert not any(table[:behind]) and all(table[behind:]), f"slot {slot} lacks blocks that it needs"
                assert not behind or group in self._windows, f"slot {slot} gave back what full attention sees"
                assert len(set(table[behind:])) == len(table) - behind, f"slot {slot} has a block twice"
                for block in table[behind:]:
                    refs[block] += 1
        wrong = [block for block, count in enumerate(refs) if count != self.pool.refs(block)]
        assert not wrong, f"reference counts of blocks {wrong[:8]} are not the number of their holders"
