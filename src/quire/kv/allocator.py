"""Block tables of the running requests: one per KV group and slot, over one pool, since all pages have the same size.

Decides which blocks a slot gets, and which blocks other requests can find. Knows nothing of queues, budgets and
preemption (`engine/`), nor of bytes (`kvstore/`). Called by one thread. A request's life here:

    match -> can_admit -> admit -> (publish | trim | grow)* -> free | forget

A group of full attention keeps all blocks of a request and takes those of the prompt at admission. A group with a
window takes blocks chunk by chunk. It keeps the blocks that later rows attend to; `trim` gives the others back. What is
said of windows holds for attention in chunks, too (`KVGroup.window`).
"""

from collections.abc import Callable, Iterable
from itertools import compress
from typing import Any

import numpy as np

from quire.contracts.blocks import NULL_BLOCK, KVGeometry, all_first_seen
from quire.contracts.step import I32
from quire.kv.blend_sources import Loans
from quire.kv.hashing import KeyChain, group_keys
from quire.kv.pool import BlockPool
from quire.kv.prefix import PrefixIndex, PrefixMatch
from quire.kv.states import StateCheckpoints

Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]


class KVAllocator:
    """Gives KV blocks to slots 0..num_slots-1. A slot holds a running request.

    block_size  tokens of a block of the key chain, which divides the blocks of all groups
    hit_size    tokens by which a match grows, a multiple of the blocks of all groups
    capacity    [num_slots] int32, tokens that a slot's blocks hold in every group (0: the slot is empty); read only
    published   [num_slots] int32, leading blocks of a slot's chain that are in the prefix cache; read only
    groups      the KV groups
    block_sizes tokens of a block of each group
    states      checkpoints of the states of recurrent layers; None: no layer keeps states
    loans       blocks that slots copy KV of, approximately
    has_windows True: a KV group has a window or chunks, so `trim` can give blocks back before a request ends
    """

    def __init__(
        self, pool: BlockPool, geometry: KVGeometry, *, num_slots: int, states: StateCheckpoints | None = None
    ) -> None:
        self.pool = pool
        self.block_size, self.hit_size = geometry.block_size, geometry.hit_size
        self.capacity: I32 = np.zeros(num_slots, np.int32)
        self.published: I32 = np.zeros(num_slots, np.int32)
        self.groups, self.block_sizes = geometry.groups, geometry.block_sizes
        self._windows = [g for g, group in enumerate(geometry.groups) if group.window is not None]
        self.has_windows = bool(self._windows)
        self._shared_size = geometry.shared_size
        self._tables: list[list[list[int]]] = [[[] for _ in range(num_slots)] for _ in geometry.groups]
        self._behind = np.zeros((len(geometry.groups), num_slots), np.int32)  # leading entries given back: NULL_BLOCK
        self._num_shared = [0] * num_slots  # leading blocks of the chain that came from a match
        self.loans = Loans(pool)
        self.states = states
        self._index = PrefixIndex(pool, geometry, states)
        self.on_withdraw: list[Callable[[list[bytes]], None]] = []  # called with the keys of every withdrawn chain
        self.on_publish: list[Callable[[KeyChain, int, int], None]] = []  # called with a range of blocks in the cache

    def match(self, chain: KeyChain, max_tokens: int) -> PrefixMatch:
        """Return the longest prefix of `chain` in the pool, at most `max_tokens` tokens. Changes nothing."""
        return self._index.match(chain, max_tokens)

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """Return the largest number of blocks that a request of `num_tokens` tokens holds at any time.

        chunk   most tokens of the request in unfinished steps; groups with a window keep blocks for these, too
        """
        return sum(group.most_blocks(num_tokens, chunk) for group in self.groups)

    def can_admit(self, match: PrefixMatch, num_tokens: int, headroom: int = 0, upto: int | None = None) -> bool:
        """True when `admit` would succeed and leave `headroom` free blocks; num_tokens, upto as in `admit`.

        Free blocks that the match would take do not count as free. Groups with a window also need free blocks for the
        later chunks of the prompt.
        """
        missing, held = 0, match.blocks[0]
        for group, blocks in zip(self.groups, match.blocks, strict=True):
            if group.window is None:
                missing += group.num_blocks(num_tokens) - len(blocks)
                continue
            chunk, behind = (num_tokens if upto is None else upto) - match.num_tokens, blocks.count(NULL_BLOCK)
            missing += behind + group.most_blocks(num_tokens - behind * group.block_size, chunk) - len(blocks)
        if self.has_windows or len(self.groups) > 1:
            held = [block for blocks in match.blocks for block in blocks if block]
        return self.pool.num_free - missing - headroom >= self.pool.num_free_among(held)

    def _held(self, slot: int) -> int:
        """Return the tokens that a slot's blocks hold in every group."""
        groups = zip(self.groups, self._tables, strict=True)
        return min([len(tables[slot]) * group.block_size for group, tables in groups])

    def _present(self, blocks: list[int]) -> list[int]:
        """Return the blocks of a table or a match without the entries that a window has passed."""
        return [block for block in blocks if block != NULL_BLOCK] if self.has_windows else blocks

    def admit(self, slot: int, match: PrefixMatch, num_tokens: int, upto: int | None = None) -> tuple[I32, ...]:
        """Give an empty slot the matched blocks, and new ones up to `num_tokens` tokens in all.

        upto   end of the first chunk in tokens (None: all); groups with a window get blocks only up to there
        Returns all block ids of the slot, an int32 array per group, in order.
        """
        pool, end = self.pool, num_tokens if upto is None else upto  # `end`: of the tokens that windows get blocks for
        assert not self._tables[0][slot], f"slot {slot} is taken"
        assert num_tokens > 0 and num_tokens >= match.num_tokens, "a slot holds at least what was matched"
        assert not match.num_tokens or match.generation == pool.generation, "a key was dropped since the match"
        for group, (tables, blocks) in enumerate(zip(self._tables, match.blocks, strict=True)):
            pool.share(self._present(blocks))  # before `take`, which may evict them
            tables[slot] += blocks
            if self.has_windows:
                self._behind[group, slot] = blocks.count(NULL_BLOCK)
        self.published[slot] = self._num_shared[slot] = match.num_tokens // self.block_size
        ids = list[I32]()
        for own, tables in zip(self.groups, self._tables, strict=True):
            table = tables[slot]
            table += pool.take(own.num_blocks(num_tokens if own.window is None else end) - len(table))
            ids.append(np.array(table, np.int32))
        self.capacity[slot] = self._held(slot)
        return tuple(ids)

    def grow(self, slot: int, num_tokens: int) -> list[tuple[int, int, int]] | None:
        """Allocate blocks until the slot holds `num_tokens` tokens in total.

        Returns (slot, group, block) of each new block; None, with nothing changed, when the pool is short.
        """
        assert self._tables[0][slot], f"slot {slot} is empty"
        rows = self.grow_many(np.array([slot]), np.array([num_tokens]))
        return None if rows is None else [(slot, group, block) for _, group, block in rows.tolist()]

    def grow_many(self, slots: Ints, num_tokens: Ints) -> I32 | None:
        """Grow several different slots at once. Returns the new blocks, [K, 3] int32 rows (slot, group, block).

        slots, num_tokens   [S], in the same order; num_tokens: of each slot in total
        Returns None, and changes nothing, when the pool lacks any block. The caller then grows slots one by one and
        chooses requests to preempt.
        """
        needy = np.flatnonzero(num_tokens > self.capacity[slots])
        if not needy.size:
            return np.empty((0, 3), np.int32)
        growing, lengths = slots[needy], num_tokens[needy]
        size, wanted = 0, list[tuple[int, int]]()
        short: list[tuple[int, int, list[int]]] = []  # slot, group and table of each block to come
        for group, tables in enumerate(self._tables):
            if size != self.groups[group].block_size:
                size = self.groups[group].block_size
                counts = -(-lengths // size)
                wanted = list(zip(growing.tolist(), counts.tolist(), strict=True))
            for slot, count in wanted:
                table = tables[slot]
                short += [(slot, group, table)] * (count - len(table))
        if len(short) > self.pool.num_free:
            return None
        taken = self.pool.take(len(short))
        for (_, _, table), block in zip(short, taken, strict=True):
            table.append(block)
        if self.hit_size == self.block_size:
            self.capacity[growing] = counts * size  # of the group with the fewest blocks
        else:
            self.capacity[growing] = [self._held(slot) for slot in growing.tolist()]
        rows = np.empty((len(short), 3), np.int32)
        rows[:, 0] = [slot for slot, _, _ in short]
        rows[:, 1] = [group for _, group, _ in short] if len(self._tables) > 1 else 0
        rows[:, 2] = taken
        return rows

    def trim(self, slots: Ints, positions: Ints) -> None:
        """Give back blocks that windows and chunks have passed: no row of `slots` from `positions` on attends to them.

        slots, positions   [S], in the same order
        The prefix cache finds published blocks until they are taken again. A step in flight still reads the old
        content, because steps run in order.
        """
        for group in self._windows:
            tables, behind = self._tables[group], self._behind[group]
            window, size = self.groups[group].window, self.groups[group].block_size
            assert window is not None
            passed = all_first_seen(positions, window) // size  # `KVGroup.num_behind` of each
            for i in np.flatnonzero(passed > behind[slots]).tolist():
                slot = int(slots[i])
                before, table = int(behind[slot]), tables[slot]
                upto = min(int(passed[i]), len(table))
                if upto > before:
                    self.pool.release(table[before:upto])
                    table[before:upto] = [NULL_BLOCK] * (upto - before)
                    behind[slot] = upto

    def publish(self, slot: int, chain: KeyChain, num_full_blocks: int) -> None:
        """Offer the slot's first blocks to other requests. Blocks already offered are skipped.

        num_full_blocks   of the chain. A group with larger blocks offers those that are full
        Blocks that depend on borrowed ones (`loans`) are never offered.

        Call this when their KV is written already, or will be by the plan that is being made, before any row attends to
        it. `chain` has the keys of the slot's request.
        """
        start = int(self.published[slot])
        num_full_blocks = max(start, self.loans.exact(slot, num_full_blocks))
        publish = self.pool.publish
        for group, tables in enumerate(self._tables):
            table, size = tables[slot], self.groups[group].block_size
            first, stop = start * self.block_size // size, num_full_blocks * self.block_size // size
            assert stop <= len(table), f"slot {slot} has {len(table)} blocks, not {stop}"
            for block, key in zip(table[first:stop], group_keys(chain, group, size, stop, first), strict=True):
                publish(block, key)
        self.published[slot] = num_full_blocks
        for tell in self.on_publish:
            tell(chain, 0 if start == self._num_shared[slot] else start, num_full_blocks)

    def withdraw(self, chain: KeyChain, start: int = 0) -> None:
        """Remove the blocks of `chain`, from number `start` on, from the prefix cache. Who holds them keeps them.

        Of a group with larger blocks, these are all that hold a token of block `start` or a later one.
        """
        keys = list[bytes]()
        for number, group in enumerate(self.groups):
            step = group.block_size // self.block_size
            keys += group_keys(chain, number, group.block_size, chain.num_hashed // step, start // step)
        found = [self.pool.lookup(key) for key in keys]
        self.pool.forget([block for block in found if block is not None])
        if self.states is not None:
            self.states.withdraw(keys)
        for tell in self.on_withdraw:
            tell(keys)

    def free(self, slot: int) -> None:
        """Give back the slot's blocks. The prefix cache finds published blocks until other requests take them."""
        assert self._tables[0][slot], f"slot {slot} is empty"
        for tables in self._tables:
            self.pool.release(self._present(tables[slot]))
            tables[slot] = []
        self.loans.forget(slot)
        self._behind[:, slot] = 0
        self.capacity[slot] = self.published[slot] = self._num_shared[slot] = 0

    def forget(self, slot: int) -> None:
        """Free the slot of a failed request, and remove the blocks that it computed itself from the index.

        Works also when admission, growth or publishing of the request broke off in the middle.
        """
        shared = self._num_shared[slot] * self.block_size
        for group, tables in zip(self.groups, self._tables, strict=True):
            self.pool.forget(tables[slot][shared // group.block_size :])
        self.free(slot)

    def shared_prefixes(self, slots: Iterable[int], least: int) -> list[tuple[list[int], int]]:
        """Return (slots, number of shared blocks) for each set of slots that begin with the same blocks.

        A set is all slots with the same first block; they share the leading blocks that all of them have. Sets that
        save fewer than `least` token reads are left out. With several groups of full attention, the group that shares
        the fewest blocks counts: in one of them a block may have been evicted and computed again. Groups whose blocks
        differ from those of the first one share nothing (`KVGeometry.shared_size`).
        """
        if self._shared_size is None:
            return []
        alike = [group.window is None and group.block_size == self._shared_size for group in self.groups]
        full = list(compress(self._tables, alike))
        begun = [slot for slot in slots if full[0][slot]]
        firsts = [full[0][slot][0] for slot in begun]
        if len(set(firsts)) == len(firsts):
            return []
        groups: dict[int, list[int]] = {}
        for slot, first in zip(begun, firsts, strict=True):
            groups.setdefault(first, []).append(slot)
        found = []
        for members in groups.values():
            same = min(_num_alike([tables[slot] for slot in members]) for tables in full)
            if same * self._shared_size * (len(members) - 1) >= least:
                found.append((members, same))
        return found

    def num_blocks(self, slot: int) -> int:
        """Return the number of entries of a slot's first block table; 0: the slot is empty."""
        return len(self._tables[0][slot])

    def table(self, slot: int, group: int = 0) -> list[int]:
        """Return a slot's block ids in a group, in order. This is the table itself: do not change it."""
        return self._tables[group][slot]

    def check(self, held: tuple[int, ...] = ()) -> None:
        """Assert every invariant of pool and tables. O(num_blocks + blocks in tables): for tests and idle moments.

        held   blocks referenced from elsewhere, once per reference
        """
        self.pool.check()
        refs = [0] * (self.pool.num_blocks + 1)
        for block in (*held, *self.loans.blocks()):
            refs[block] += 1
        for slot, capacity in enumerate(self.capacity.tolist()):
            tables, least = [tables[slot] for tables in self._tables], self._held(slot)
            shared, published = self._num_shared[slot] * self.block_size, int(self.published[slot]) * self.block_size
            assert capacity == least, f"capacity of slot {slot} is wrong"
            assert shared <= published <= least, f"{slot} published too much"
            assert shared % self.hit_size == 0, f"slot {slot} shares a part of a block"
            for group, table in enumerate(tables):
                behind = self._behind[group][slot]
                assert not any(table[:behind]) and all(table[behind:]), f"slot {slot} lacks blocks that it needs"
                assert not behind or group in self._windows, f"slot {slot} gave back what full attention sees"
                assert len(set(table[behind:])) == len(table) - behind, f"slot {slot} has a block twice"
                for block in table[behind:]:
                    refs[block] += 1
        wrong = [block for block, count in enumerate(refs) if count != self.pool.refs(block)]
        assert not wrong, f"reference counts of blocks {wrong[:8]} are not the number of their holders"


def _num_alike(tables: list[list[int]]) -> int:
    """Return the number of leading blocks that all tables share."""
    first, last = min(tables), max(tables)  # in the order of ids: blocks that these two share are in all
    shorter = min(len(first), len(last))
    return next((i for i in range(shorter) if first[i] != last[i]), shorter)
