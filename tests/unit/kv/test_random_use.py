"""Random sequences of everything a scheduler does, against a model that knows what each block really contains."""

import math
from array import array
from collections.abc import Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.kv.allocator import KVAllocator
from quire.kv.hashing import KeyChain, group_keys
from quire.kv.pool import BlockPool

SIZE = 2
NUM_SLOTS = 4
ROOT = bytes(32)
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=11)
Content = tuple[int, str, tuple[int, ...]]  # group, salt, tokens
SALTS = st.sampled_from(["", "", "", "a", "b"])


class Running:
    """A request in a slot: its tokens, and how many of them have their KV written."""

    def __init__(self, tokens: Sequence[int], salt: str, sizes: tuple[int, ...]) -> None:
        self.salt, self.sizes = salt, sizes
        self.tokens = array("I", tokens)
        self.chain = KeyChain(ROOT, math.gcd(*sizes), self.tokens, [("salt", salt)] if salt else [])
        self.num_computed = 0

    def content(self, block: int, group: int) -> Content:
        """Return the content of block `block` of a group's table: everything up to its last token decides its KV."""
        return group, self.salt, tuple(self.tokens[: (block + 1) * self.sizes[group]])


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 12),
        windows=st.sampled_from(
            [(None,), (None, 3), (4,), (2, None, 5), (None, None), (None, -3), (-4,), (4, None, -5)]
        ),
        many=st.sampled_from([(1,), (1, 2), (2, 1), (1, 4)]),
    )
    def start(self, num_blocks: int, windows: tuple[int | None, ...], many: tuple[int, ...]) -> None:
        self.sizes = tuple(SIZE * many[i % len(many)] for i in range(len(windows)))
        component = KVComponent("k", 1, 8, "float32", 4)
        self.groups = tuple(
            KVGroup(layers=(i,), components=(component,), window=w, block_size=size)
            for i, (w, size) in enumerate(zip(windows, self.sizes, strict=True))
        )
        geometry = KVGeometry(groups=self.groups)
        self.size = geometry.block_size
        self.alloc = KVAllocator(BlockPool(num_blocks * len(windows)), geometry, num_slots=NUM_SLOTS)
        self.running: dict[int, Running] = {}
        self.written: dict[int, Content] = {}

    def request(self, tokens: Sequence[int], salt: str) -> Running:
        return Running(tokens, salt, self.sizes)

    def tables(self, slot: int) -> list[list[int]]:
        return [list(self.alloc.table(slot, group)) for group in range(len(self.groups))]

    def compute(self, slot: int, upto: int) -> None:
        """Write the KV of tokens [num_computed, upto), as the forward pass does."""
        request = self.running[slot]
        for group, table in enumerate(self.tables(slot)):
            for position in range(request.num_computed, upto):
                index = position // self.sizes[group]
                block = table[index]
                assert self.alloc.pool.refs(block) == 1, "a shared block is written"
                if (index + 1) * self.sizes[group] > self.alloc.published[slot] * self.size:
                    assert self.alloc.pool.key(block) is None, "a findable block is written outside its plan"
                self.written[block] = (group, request.salt, tuple(request.tokens[: position + 1]))
        request.num_computed = max(upto, request.num_computed)

    @precondition(lambda self: len(self.running) < NUM_SLOTS)
    @rule(prompt=PROMPTS, salt=SALTS, headroom=st.integers(0, 2), use_cache=st.booleans(), chunk=st.integers(1, 12))
    def admit(self, prompt: list[int], salt: str, headroom: int, use_cache: bool, chunk: int) -> None:
        slot = min(set(range(NUM_SLOTS)) - set(self.running))
        request = self.request(prompt, salt)
        match = self.alloc.match(request.chain, len(prompt) - 1 if use_cache else 0)
        assert match.num_tokens <= max(0, len(prompt) - 1)
        for group, blocks in enumerate(match.blocks):
            assert len(blocks) * self.sizes[group] == match.num_tokens, "a hit ends inside of a block"
            for index in range(self.groups[group].num_behind(match.num_tokens), len(blocks)):
                assert self.written[blocks[index]] == request.content(index, group), "a hit on other tokens"
        free, upto = self.alloc.pool.num_free, min(len(prompt), match.num_tokens + chunk)
        if not self.alloc.can_admit(match, len(prompt), headroom, upto):
            assert self.alloc.pool.num_free == free
            return
        for ids, blocks in zip(self.alloc.admit(slot, match, len(prompt), upto), match.blocks, strict=True):
            assert ids.tolist()[: len(blocks)] == blocks
            self.poison(ids.tolist()[len(blocks) :])
        assert self.alloc.pool.num_free >= headroom
        request.num_computed = match.num_tokens
        self.running[slot] = request

    def poison(self, blocks: list[int]) -> None:
        for block in blocks:
            assert self.alloc.pool.refs(block) == 1 and self.alloc.pool.key(block) is None
            self.written[block] = (-1, "poison", ())

    @precondition(lambda self: self.running)
    @rule(data=st.data(), chunk=st.integers(1, 5))
    def prefill(self, data: st.DataObject, chunk: int) -> None:
        """Compute a chunk: full blocks are published at planning, then written in the same step."""
        slot = data.draw(st.sampled_from(sorted(self.running)))
        request = self.running[slot]
        upto = min(request.num_computed + chunk, len(request.tokens))
        if not self.grow(slot, request.num_computed, upto):
            return
        self.alloc.publish(slot, request.chain, upto // self.size)
        self.compute(slot, upto)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def decode(self, data: st.DataObject, tokens: list[int]) -> None:
        """Sampled tokens are written, and published when their block is full."""
        slot = data.draw(st.sampled_from(sorted(self.running)))
        request = self.running[slot]
        if not self.grow(slot, request.num_computed, len(request.tokens) + len(tokens)):
            return
        self.compute(slot, len(request.tokens))
        request.tokens.extend(tokens)
        self.compute(slot, len(request.tokens))
        self.alloc.publish(slot, request.chain, len(request.tokens) // self.size)

    def grow(self, slot: int, position: int, length: int) -> bool:
        """Blocks for rows from `position` on, up to `length` tokens; False when there are not enough."""
        self.alloc.trim(np.array([slot]), np.array([position]))
        free, before = self.alloc.pool.num_free, self.tables(slot)
        grown = self.alloc.grow(slot, length)
        if grown is None:
            assert self.alloc.pool.num_free == free and self.tables(slot) == before
            return False
        self.poison([block for _, _, block in grown])
        return True

    @precondition(lambda self: self.running)
    @rule(extra=st.integers(0, 5))
    def grow_all(self, extra: int) -> None:
        slots = np.array(sorted(self.running))
        wanted = np.array([len(self.running[slot].tokens) + extra for slot in slots.tolist()])
        before = [self.tables(slot) for slot in slots.tolist()]
        rows = self.alloc.grow_many(slots, wanted)
        if rows is None:
            assert [self.tables(slot) for slot in slots.tolist()] == before
            return
        assert (self.alloc.capacity[slots] >= wanted).all()
        self.poison(rows[:, 2].tolist())

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def exhaust(self, data: st.DataObject) -> None:
        """A slot takes all free blocks; the next block is refused."""
        slot = data.draw(st.sampled_from(sorted(self.running)))
        while (taken := self.alloc.grow(slot, int(self.alloc.capacity[slot]) + 1)) is not None:
            self.poison([block for _, _, block in taken])
        assert self.alloc.pool.num_free < len(self.groups)
        assert not self.alloc.can_admit(self.alloc.match(self.request([1], "").chain, 0), 1)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.running)))
        self.alloc.free(slot)
        del self.running[slot]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.running)))
        tables = self.tables(slot)
        before = {block: self.alloc.pool.key(block) for table in tables for block in table}
        shared = self.alloc._num_shared[slot] * self.size
        kept = {block for table, size in zip(tables, self.sizes, strict=True) for block in table[: shared // size]}
        self.alloc.forget(slot)
        for block in before:
            assert self.alloc.pool.key(block) == (before[block] if block in kept else None)
        del self.running[slot]

    @rule()
    def reset(self) -> None:
        assert self.alloc.pool.reset() == (not self.running)
        assert self.alloc.pool.num_cached == 0

    @invariant()
    def everything_holds(self) -> None:
        self.alloc.check()
        pool = self.alloc.pool
        for key, block in pool._index.items():
            group, salt, tokens = self.written[block]
            size = self.sizes[group]
            assert len(tokens) % size == 0 and tokens, "an unfinished block is findable"
            own = group_keys(self.request(tokens, salt).chain, group, size, len(tokens) // size)[-1]
            assert own == key, "a block contains other tokens than its key says"
        for slot, request in self.running.items():
            for group, table in enumerate(self.tables(slot)):
                first = self.groups[group].num_behind(request.num_computed)
                for index in range(first, request.num_computed // self.sizes[group]):
                    assert self.written[table[index]] == request.content(index, group), "KV was overwritten"


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRandomUse = AllocatorMachine.TestCase
