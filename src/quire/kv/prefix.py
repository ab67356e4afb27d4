"""Lookup of the blocks that already hold the beginning of a request.

Walks a request's key chain through a pool's index. Changes nothing: `KVAllocator.admit` takes the blocks.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec

from quire.contracts.blocks import NULL_BLOCK, KVGroup
from quire.kv.hashing import KeyChain, group_keys

_STRIDE = 64  # keys hashed at a time, so that a cold prompt of 128k tokens is not hashed to its end only to miss


class PrefixMatch(msgspec.Struct, frozen=True):
    """The longest reusable prefix of a request.

    blocks       for each KV group, block ids in table order; NULL_BLOCK where the window has passed at the prefix's end
    num_tokens   tokens in these blocks, a multiple of the block size
    broke_at     index of the first missing block; None when `max_tokens`, not a miss, ended the search
    generation   `BlockPool.generation` at the match: `admit` refuses the match after any key was dropped
    """

    blocks: tuple[list[int], ...]
    num_tokens: int
    broke_at: int | None
    generation: int

    @property
    def num_blocks(self) -> int:
        """Number of blocks in each group, NULL_BLOCK entries included."""
        return len(self.blocks[0])


class Lookup(Protocol):
    """Finds blocks by key: a `BlockPool`, or several tiers together. `generation` changes when a key is dropped."""

    generation: int

    def lookup(self, key: bytes) -> int | None:
        """Return the block with this key, a number above 0; None when there is none."""


class PrefixIndex:
    """Longest-prefix lookup of full blocks over one pool, or over several tiers.

    A prefix of n blocks is found when every group has the blocks that later rows attend to: all n with full attention,
    the last ones with a window.
    """

    def __init__(self, pool: Lookup, block_size: int, groups: tuple[KVGroup, ...]) -> None:
        self._pool, self._block_size, self._groups = pool, block_size, groups
        self._full = [g for g, group in enumerate(groups) if group.window is None]
        self._windows = [(g, group) for g, group in enumerate(groups) if group.window is not None]

    def match(self, chain: KeyChain, max_tokens: int) -> PrefixMatch:
        """Return the longest prefix of `chain` in the pool, in full blocks, at most `max_tokens` tokens.

        max_tokens   at most the prompt without its last token, because that token's logits must be computed
        """
        assert chain.block_size == self._block_size, "a chain of another block size"
        limit = num = max(0, min(max_tokens, len(chain.tokens)) // self._block_size)
        found: list[list[int]] = [[]] * len(self._groups)
        for index in self._full:
            found[index] = self._walk(chain, num, index)
            num = len(found[index])
        if self._windows:
            num = self._shrink(chain, num)
            keys = chain.keys(num)
            for index, group in self._windows:
                first = group.num_behind(num * self._block_size)
                seen = [self._pool.lookup(key) or NULL_BLOCK for key in group_keys(keys[first:], index)]
                found[index] = [NULL_BLOCK] * first + seen
        if len(found) > 1:
            found = [blocks[:num] for blocks in found]
        return PrefixMatch(tuple(found), num * self._block_size, num if num < limit else None, self._pool.generation)

    def _walk(self, chain: KeyChain, limit: int, group: int) -> list[int]:
        """Return the blocks of a group from the first on, up to `limit` or to the first missing block."""
        lookup = self._pool.lookup
        blocks: list[int] = []
        while (start := len(blocks)) < limit:
            for key in group_keys(chain.keys(min(start + _STRIDE, limit), start), group):
                block = lookup(key)
                if block is None:
                    return blocks
                blocks.append(block)
        return blocks

    def _shrink(self, chain: KeyChain, num: int) -> int:
        """Return the length of the longest prefix, at most `num` blocks, after which no window misses a block."""
        before = -1
        while num != before:
            before = num
            for index, group in self._windows:
                at = num - 1
                while at >= group.num_behind(num * self._block_size):
                    if self._pool.lookup(group_keys(chain.keys(at + 1, at), index)[0]) is None:
                        num = at
                    at -= 1
        return num


def matched_blocks(wanted: Iterable[tuple[KeyChain, PrefixMatch]]) -> Iterator[tuple[KeyChain, int, bytes]]:
    """Yield (chain, index, key) of every block of the matches, of all KV groups."""
    for chain, reach in wanted:
        keys = [group_keys(chain.keys(reach.num_blocks), group) for group in range(len(reach.blocks))]
        for index in range(reach.num_blocks):
            for group, blocks in enumerate(reach.blocks):
                if blocks[index]:
                    yield chain, index, keys[group][index]
