"""Lookup of the blocks that already hold the beginning of a request.

Walks a request's key chain through a pool's index. Changes nothing: `KVAllocator.admit` takes the blocks.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec

from quire.contracts.blocks import NULL_BLOCK, KVGeometry
from quire.kv.hashing import KeyChain, group_keys

_STRIDE = 64  # keys hashed at a time, so that a cold prompt of 128k tokens is not hashed to its end only to miss


class PrefixMatch(msgspec.Struct, frozen=True):
    """The longest reusable prefix of a request.

    blocks       for each KV group, block ids in table order; NULL_BLOCK where the window has passed at the prefix's end
    num_tokens   tokens in these blocks, a multiple of `KVGeometry.hit_size`
    broke_at     the same number, if a missing block ended the search; None when `max_tokens` did
    checkpoint   number of the checkpoint of states at the prefix's end; 0: no layer keeps states, or there is no prefix
    reach        tokens found in blocks, at least `num_tokens`: without a checkpoint there they cannot be used
    generation   `BlockPool.generation` at the match: `admit` refuses the match after any key was dropped
    """

    blocks: tuple[list[int], ...]
    num_tokens: int
    broke_at: int | None
    generation: int
    checkpoint: int = 0
    reach: int = 0


class Lookup(Protocol):
    """Finds blocks by key: a `BlockPool`, or several tiers together. `generation` changes when a key is dropped."""

    generation: int

    def lookup(self, key: bytes) -> int | None:
        """Return the block with this key, a number above 0; None when there is none."""


class StateFinder(Protocol):
    """Finds checkpoints of states: those of the device, or those of several tiers together."""

    def find(self, chain: KeyChain, most: int) -> tuple[int, int]:
        """Return (length, checkpoint) of the longest beginning of a chain with a checkpoint; (0, 0): there is none.

        most   most tokens of the beginning
        """


class PrefixIndex:
    """Longest-prefix lookup of full blocks over one pool, or over several tiers.

    A prefix is found when every group has the blocks that later rows attend to: all of them with full attention, the
    last ones with a window; if layers keep states, it ends at a checkpoint of them. It ends where the blocks of all
    groups end, that is at a multiple of `hit_size` tokens.
    """

    def __init__(self, pool: Lookup, geometry: KVGeometry, states: StateFinder | None = None) -> None:
        self._pool, self._groups = pool, geometry.groups
        self._states = states
        self._block_size, self._hit_size = geometry.block_size, geometry.hit_size
        self._per_hit = [geometry.hit_size // size for size in geometry.block_sizes]  # blocks of each group
        self._full = [g for g, group in enumerate(geometry.groups) if group.window is None]
        self._windows = [(g, group) for g, group in enumerate(geometry.groups) if group.window is not None]

    def match(self, chain: KeyChain, max_tokens: int) -> PrefixMatch:
        """Return the longest prefix of `chain` in the pool, in full blocks, at most `max_tokens` tokens.

        max_tokens   at most the prompt without its last token, because that token's logits must be computed
        """
        assert chain.block_size == self._block_size, "a chain of another block size"
        limit = num = max(0, min(max_tokens, len(chain.tokens))) // self._hit_size
        found: list[list[int]] = [[]] * len(self._groups)
        for index in self._full:
            found[index] = self._walk(chain, num * self._per_hit[index], index)
            num = len(found[index]) // self._per_hit[index]
        reach, checkpoint = num, 0
        if self._windows:
            num = reach = self._shrink(chain, num)
        while self._states is not None and num:
            length, checkpoint = self._states.find(chain, num * self._hit_size)
            num = length // self._hit_size
            if not self._windows or (seen := self._shrink(chain, num)) == num:
                break
            num = seen
        if self._windows:
            for index, group in self._windows:
                first, stop = group.num_behind(num * self._hit_size), num * self._per_hit[index]
                keys = group_keys(chain, index, group.block_size, stop, first)
                found[index] = [NULL_BLOCK] * first + [self._pool.lookup(key) or NULL_BLOCK for key in keys]
        if len(found) > 1 or num < reach:
            found = [blocks[: num * each] for blocks, each in zip(found, self._per_hit, strict=True)]
        length = num * self._hit_size
        broke_at, reach = length if num < limit else None, reach * self._hit_size
        return PrefixMatch(tuple(found), length, broke_at, self._pool.generation, checkpoint * bool(num), reach)

    def _walk(self, chain: KeyChain, limit: int, group: int) -> list[int]:
        """Return the blocks of a group from the first on, up to `limit` or to the first missing block."""
        lookup, size = self._pool.lookup, self._groups[group].block_size
        blocks: list[int] = []
        while (start := len(blocks)) < limit:
            for key in group_keys(chain, group, size, min(start + _STRIDE, limit), start):
                block = lookup(key)
                if block is None:
                    return blocks
                blocks.append(block)
        return blocks

    def _shrink(self, chain: KeyChain, num: int) -> int:
        """Return the longest prefix, of at most `num` times `hit_size` tokens, after which no window misses a block."""
        before = -1
        while num != before:
            before = num
            for index, group in self._windows:
                each, size = self._per_hit[index], group.block_size
                at = num * each - 1
                while at >= group.num_behind(num * self._hit_size):
                    if self._pool.lookup(group_keys(chain, index, size, at + 1, at)[0]) is None:
                        num = at // each
                        at = num * each
                    at -= 1
        return num


def matched_blocks(
    wanted: Iterable[tuple[KeyChain, PrefixMatch]], sizes: tuple[int, ...]
) -> Iterator[tuple[KeyChain, range, bytes]]:
    """Yield (chain, places, key) of every block of the matches, from the front to the end. `sizes`: tokens by group.

    places   the blocks of the chain with the same tokens: a block of a group may have several
    """
    for chain, reach in wanted:
        steps = [size // chain.block_size for size in sizes]
        keys = [
            group_keys(chain, group, size, len(blocks))
            for group, (size, blocks) in enumerate(zip(sizes, reach.blocks, strict=True))
        ]
        for place in range(reach.num_tokens // chain.block_size):
            for group, (step, blocks) in enumerate(zip(steps, reach.blocks, strict=True)):
                if place % step == 0 and blocks[place // step]:
                    yield chain, range(place, place + step), keys[group][place // step]
