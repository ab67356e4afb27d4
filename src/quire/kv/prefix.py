"""Which blocks already hold the beginning of a request.

Walks a request's key chain through a pool's index. Has no effect: `KVAllocator.admit` takes the blocks.
"""

import msgspec

from quire.kv.hashing import KeyChain
from quire.kv.pool import BlockPool

_STRIDE = 64  # keys hashed at a time, so that a cold 128k prompt is not hashed to the end to learn that it misses


class PrefixMatch(msgspec.Struct, frozen=True):
    """The longest reusable beginning of a request.

    blocks       ids, in table order;  num_tokens  that they hold, a multiple of the block size
    broke_at     index of the first block that is not there; None when the limit, not a miss, ended the walk
    generation   of the pool: `admit` refuses a match that is older than the last dropped key
    """

    blocks: list[int]
    num_tokens: int
    broke_at: int | None
    generation: int


class PrefixIndex:
    """Longest-prefix lookup of full blocks over one pool."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    def match(self, chain: KeyChain, max_tokens: int) -> PrefixMatch:
        """Blocks of the first full blocks of `chain`, at most `max_tokens` tokens (the caller keeps at least the last
        token out: someone has to compute its logits)."""
        assert chain.block_size == self._block_size, "a chain of another block size"
        lookup = self._pool.lookup
        limit = max(0, min(max_tokens, len(chain.tokens)) // self._block_size)
        blocks: list[int] = []
        missed = False
        while not missed and len(blocks) < limit:
            start = len(blocks)
            for key in chain.keys(min(start + _STRIDE, limit), start):
                block = lookup(key)
                if block is None:
                    missed = True
                    break
                blocks.append(block)
        num = len(blocks)
        return PrefixMatch(blocks, num * self._block_size, num if missed else None, self._pool.generation)
