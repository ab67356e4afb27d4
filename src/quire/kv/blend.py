"""Reuse of KV at other positions (CacheBlend): the tokens of a prompt that it serves, and their record in a plan.

A chunk is a part of a prompt whose tokens were cached alone, as a prompt of their own. Its keys are an ordinary key
chain that starts anew at the chunk, so the ordinary pool holds its blocks.
Tokens at its end that fill no block are computed.
Knows tokens, keys and blocks. Knows nothing of slots and of the choice of rows (`worker/blending.py`).
"""

import math
from array import array
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from quire.contracts.blocks import NULL_BLOCK
from quire.contracts.request import MovedTokens
from quire.contracts.step import BlendedChunk
from quire.kv.allocator import KVAllocator
from quire.kv.hashing import KeyChain, group_keys


class ChunkIndex:
    """Finds the blocks of chunks in the allocator's pool.

    A token can be moved if every KV group has its block. A group with a window gives up the blocks of most tokens of a
    long text; they are found until the pool uses them again.
    Blocks that the step being planned computes do not count: the step would read them before they are written.
    """

    def __init__(self, allocator: KVAllocator, root_key: bytes) -> None:
        self._allocator, self._size, self._root = allocator, allocator.block_size, root_key
        self._chains: dict[int, list[tuple[int, KeyChain]]] = {}  # handle -> first token and keys of each chunk
        self._new: set[int] = set()  # blocks published since the step's planning began
        allocator.pool.on_publish.append(lambda block, key: self._new.add(block))

    def add(self, handle: int, whole: KeyChain, chunks: Sequence[tuple[int, int]]) -> None:
        """Remember the chunks of a prompt that fill a block. `whole`: keys of the prompt, whose tags they have."""
        self._chains[handle] = [
            (first, KeyChain(self._root, self._size, array("I", whole.tokens[first:last]), whole.tags))
            for first, last in chunks
            if last - first >= self._size
        ]

    def forget(self, handle: int) -> None:
        """Forget the chunks of a prompt. An unknown handle is ignored."""
        self._chains.pop(handle, None)

    def chains(self, handle: int, num_exact: int) -> list[KeyChain]:
        """Return the keys of the chunks of a prompt that end behind its first `num_exact` tokens."""
        return [chain for first, chain in self._chains.get(handle, ()) if first + len(chain.tokens) > num_exact]

    def begin_step(self) -> None:
        """Note that the planning of a step begins: all published blocks are computed by earlier steps."""
        self._new.clear()

    def find(self, handle: int, num_exact: int, end: int) -> tuple[MovedTokens, ...]:
        """Return the tokens of a prompt from `num_exact` on, and before `end`, whose KV can be moved. Changes nothing.

        num_exact   tokens at the front whose KV is found exactly
        end         at most the last token, because that token's logits must be computed
        """
        found = []
        for start, chain in self._chains.get(handle, ()):
            blocks, size = self._blocks(chain), self._size
            for begin, stop in self._whole(blocks, min(len(chain.tokens), end - start)):
                first, last = max(start + begin * size, num_exact), min(start + stop * size, end)
                if first < last:
                    found.append(MovedTokens(first, last, start, blocks))
        return tuple(found)

    def _blocks(self, chain: KeyChain) -> tuple[tuple[int, ...], ...]:
        """Return the blocks of a chunk, of each KV group; NULL_BLOCK for one that an earlier step has not computed."""
        pool, found = self._allocator.pool, []
        for number, group in enumerate(self._allocator.groups):
            size, blocks = group.block_size, list[int]()
            for at in range(len(chain.tokens) // size):
                block = pool.lookup(group_keys(chain, number, size, at + 1, at)[0])
                if block is None and group.window is None:
                    break  # the keys behind it are not computed in vain
                blocks.append(NULL_BLOCK if block is None or block in self._new else block)
            found.append(tuple(blocks))
        return tuple(found)

    def _whole(self, blocks: Sequence[Sequence[int]], num_tokens: int) -> list[tuple[int, int]]:
        """Return (first block, end) of the runs of a chunk's blocks that all groups have, up to `num_tokens` tokens."""
        steps = [group.block_size // self._size for group in self._allocator.groups]
        count = min([-(-num_tokens // self._size), *(len(own) * step for own, step in zip(blocks, steps, strict=True))])
        has = [all(own[at // step] for own, step in zip(blocks, steps, strict=True)) for at in range(count)]
        runs = [list(run) for whole, run in groupby(range(count), has.__getitem__) if whole]
        return [(run[0], run[-1] + 1) for run in runs]


def sources(moved: Sequence[MovedTokens], sizes: Sequence[int]) -> list[int]:
    """Return the blocks that moved tokens read, each once. sizes: tokens of a block of each KV group"""
    found = dict[int, None]()
    for one in moved:
        for blocks, size in zip(one.blocks, sizes, strict=True):
            first, last = (one.first - one.shift) // size, -(-(one.last - one.shift) // size)
            found |= dict.fromkeys(blocks[first:last])
    return list(found)


def blocks_within(moved: Sequence[MovedTokens], block_size: int) -> list[int]:
    """Return the numbers of a prompt's blocks of which at least half the tokens are moved."""
    if not moved:
        return []
    positions = np.concatenate([np.arange(one.first, one.last) for one in moved])
    return np.flatnonzero(2 * np.bincount(positions // block_size) >= block_size).tolist()


def blended_chunk(
    moved: Sequence[MovedTokens], slot: int, first: int, last: int, ratio: float, sizes: Sequence[int]
) -> BlendedChunk | None:
    """Return the moved tokens among the tokens first .. last - 1 of a prompt, for a step's plan; None: there are none.

    ratio   share of the moved tokens that is computed in all layers
    sizes   tokens of a block of each KV group
    """
    positions, places, shifts = [], [], []
    for one in moved:
        here = np.arange(max(one.first, first), min(one.last, last), dtype=np.int32)
        inside = here - one.shift
        positions.append(here - first)
        groups = zip(one.blocks, sizes, strict=True)
        places.append([np.array(own, np.int32)[inside // size] * size + inside % size for own, size in groups])
        shifts.append(np.full(len(here), one.shift, np.int32))
    if not any(len(here) for here in positions):
        return None
    tokens = np.concatenate(positions)
    return BlendedChunk(
        slot=slot,
        tokens=tokens,
        sources=np.concatenate(places, axis=1),
        shifts=np.concatenate(shifts),
        num_kept=min(len(tokens), math.ceil(ratio * len(tokens) - 1e-6)),
    )
