"""Geometry of the paged KV cache: the numbers shared by `kv/` (bookkeeping) and `kvstore/` (bytes)."""

from bisect import bisect_right
from math import gcd, lcm, prod
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np

NULL_BLOCK = 0  # reserved: padding reads and writes this block; it is never allocated
GATHERED = 1 << 16  # tokens of prompts' contexts on several ranks that are gathered at a time, unless one has more
PAGE_ALIGN = 256  # bytes; every component of a page starts at a multiple of this


def first_seen(position: int, window: int | None) -> int:
    """Return the first position that a token at `position` attends to.

    window   see `KVGroup`
    """
    if window is None:
        return 0
    return max(0, position - window + 1) if window > 0 else position - position % -window


def all_first_seen(positions: "np.ndarray[Any, Any]", window: int) -> "np.ndarray[Any, Any]":
    """Return `first_seen` of each position of an array of integers."""
    first = positions - positions % -window if window < 0 else positions - window + 1
    return first.clip(0)


class KVComponent(msgspec.Struct, frozen=True):
    """A tensor of a KV block for each layer of its group, such as keys or values. Layout: `[head][entry][dim]`."""

    name: str
    num_heads: int
    head_dim: int
    dtype: str
    item_bytes: int

    def num_bytes(self, entries: int) -> int:
        """Bytes of this component for one layer in one block of so many entries, rounded up to PAGE_ALIGN."""
        exact = self.num_heads * entries * self.head_dim * self.item_bytes
        return -(-exact // PAGE_ALIGN) * PAGE_ALIGN


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A set of layers whose KV has the same lifetime. Each request has one block table per group.

    block_size        tokens of a block
    tokens_per_entry  tokens that share an entry of the cache; above 1 for caches that compress their tokens
    parts             ranks that divide the tokens of a block: each has as many neighbouring ones, in the order of ranks
    window            w > 0: a query attends to w tokens, its own included. w < 0: chunks of -w tokens, the first of
                      which begins at position 0; a query attends to its own chunk, up to itself. None: full attention
    drafts            components of the last `num_drafts` layers, which are those of a draft model
    fewer             (layer, n) of each layer that keeps only the first n components
    """

    layers: tuple[int, ...]
    components: tuple[KVComponent, ...]
    block_size: int
    tokens_per_entry: int = 1
    parts: int = 1
    window: int | None = None
    drafts: tuple[KVComponent, ...] = ()
    num_drafts: int = 0
    fewer: tuple[tuple[int, int], ...] = ()

    @property
    def entries(self) -> int:
        """Entries of a rank's part of a block, in each component of a layer."""
        return self.block_size // (self.tokens_per_entry * self.parts)

    @property
    def page_bytes(self) -> int:
        """Bytes of a rank's part of a block: of the components of all layers of the group."""
        return sum(one.num_bytes(self.entries) for layer in self.layers for one in self.of(layer))

    def of(self, layer: int) -> tuple[KVComponent, ...]:
        """Return the components of a layer of the group."""
        return self.drafts if self.is_draft(layer) else self.components[: dict(self.fewer).get(layer)]

    def is_draft(self, layer: int) -> bool:
        """Return True for a layer of the draft model."""
        return layer in self.layers[len(self.layers) - self.num_drafts :]

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` tokens, if none is given back."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int, chunk: int) -> int:
        """Return the most blocks that a request of so many tokens holds at any time.

        chunk   most tokens of the request in unfinished steps; a window keeps blocks for these, too
        """
        whole, size = self.num_blocks(num_tokens), self.block_size
        if self.window is None:
            return whole
        if self.window > 0:
            return min(whole, (self.window + chunk - 3) // size + 2)
        before = size - gcd(size, self.window)  # most tokens of a block before the beginning of a chunk of attention
        return min(whole, -(-(before - self.window - 1 + chunk) // size))

    def num_behind(self, position: int) -> int:
        """Return the number of leading blocks that the window has passed for all queries from `position` on."""
        return first_seen(position, self.window) // self.block_size


class StateComponent(msgspec.Struct, frozen=True):
    """A tensor that a layer keeps of a request, whatever its length, such as a matrix per head. Layout: `shape`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of a layer's part of a slot, rounded up to PAGE_ALIGN."""
        return -(-prod(self.shape) * self.item_bytes // PAGE_ALIGN) * PAGE_ALIGN


class StateGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A set of layers with equal states. A slot has the states of all of them, of a running request."""

    layers: tuple[int, ...]
    components: tuple[StateComponent, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return len(self.layers) * sum(one.num_bytes for one in self.components)


class KVGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that layers keep of requests: blocks of tokens, by group, and states of a fixed size.

    Blocks of all groups come from the same pages, which have room for the largest.
    Groups may differ in tokens per block. With blocks of 32 and 64 tokens, `block_size` is 32 and `hit_size` is 64.
    """

    groups: tuple[KVGroup, ...]
    states: tuple[StateGroup, ...] = ()

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a request."""
        return sum(group.slot_bytes for group in self.states)

    @property
    def block_size(self) -> int:
        """Tokens of a key: the largest number that divides the blocks of all groups. Equal blocks have this size."""
        return gcd(*self.block_sizes)

    @property
    def hit_size(self) -> int:
        """The smallest number of tokens that the blocks of all groups divide. A prefix hit is a multiple of it."""
        return lcm(*self.block_sizes)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens of a block, by group."""
        return tuple(group.block_size for group in self.groups)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, the memory of a KV block: those of the largest group; of a stage without attention, few."""
        return max(group.page_bytes for group in self.groups) or PAGE_ALIGN

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group."""
        return tuple(group.window for group in self.groups)

    @property
    def shared_size(self) -> int | None:
        """Tokens of a block in which shared prefixes are counted: of the first group of full attention; None: of none.

        Groups of full attention whose blocks have another size read a shared prefix once per request.
        """
        return next((group.block_size for group in self.groups if group.window is None), None)

    def num_tokens(self, num_blocks: int) -> int:
        """Return the tokens of `num_blocks` blocks, of which each group has a share that holds equally many tokens."""
        size = self.hit_size
        return num_blocks * len(self.groups) * size // sum(size // one for one in self.block_sizes)

    def gathered_bytes(self, longest: int, sequences: int) -> int:
        """Return the bytes in which a layer gathers contexts of prompts from ranks that divide them; 0: no ranks do.

        longest, sequences   most tokens of a request; most requests
        The rank's own parts are there three times: taken out of pages, side by side, and among those of all ranks.
        """
        num_tokens, found = min(max(GATHERED, longest), longest * sequences), [0]
        for group in self.groups:
            part = max(sum(one.num_bytes(group.entries) for one in kept) for kept in (group.components, group.drafts))
            found.append(group.num_blocks(num_tokens) * part * (group.parts + 2) * (group.parts > 1))
        return max(found)

    def table_entries(self, num_tokens: int) -> int:
        """Return the entries that the block tables of all groups have for a request of so many tokens."""
        return sum(group.num_blocks(num_tokens) for group in self.groups)

    def request_blocks(self, num_tokens: int, chunk: int) -> int:
        """Return the most blocks, over all groups, that a request of `num_tokens` tokens holds at any time.

        chunk   most tokens of the request in unfinished steps
        """
        return sum(group.most_blocks(num_tokens, chunk) for group in self.groups)

    def most_tokens(self, num_blocks: int, chunk: int, upto: int) -> int:
        """Return the length of the longest request, of at most `upto` tokens, that fits into `num_blocks` blocks."""
        return bisect_right(range(upto + 1), num_blocks, key=lambda length: self.request_blocks(length, chunk)) - 1
