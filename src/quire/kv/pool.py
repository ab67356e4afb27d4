"""Blocks of one tier: their reference counts, the order of the free blocks, and the content of each block.

    in use   refs > 0                      with or without a key
    blank    refs = 0, no key              a stack: the content is worthless, any block will do
    cached   refs = 0, a key               least recently used first; can be hit until it is taken

`take` uses the blank stack before it evicts from the cached list. Knows nothing of tokens, slots or bytes. The same
class serves the device and every later tier.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from quire.contracts.blocks import NULL_BLOCK


class BlockPool:
    """Reference counts, prefix cache keys and order of reuse of the blocks 1..num_blocks (block 0 is reserved).

    evictions    number of keys dropped because their block was needed
    generation   changes whenever a key is dropped: a match made at an older generation may be stale
    on_drop      functions to call with every dropped key and the reason: "evicted", "distrusted" (`forget`) or "reset"
    on_publish   functions to call with every block that gets a key, and the key
    """

    __slots__ = (
        "num_blocks",
        "evictions",
        "generation",
        "on_drop",
        "on_publish",
        "_refs",
        "_keys",
        "_index",
        "_blank",
        "_cached",
    )

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, "a pool needs a block"
        self.num_blocks = num_blocks
        self.evictions = 0
        self.generation = 0
        self.on_drop: list[Callable[[bytes, str], None]] = []
        self.on_publish: list[Callable[[int, bytes], None]] = []
        self._refs = [0] * (num_blocks + 1)
        self._keys: list[bytes | None] = [None] * (num_blocks + 1)
        self._index: dict[bytes, int] = {}
        self._blank = list(range(num_blocks, NULL_BLOCK, -1))  # popped from the end: 1, 2, 3, ...
        self._cached: OrderedDict[int, None] = OrderedDict()  # a linked list with O(1) removal, in C

    @property
    def num_free(self) -> int:
        """Number of blocks that `take` can give: blank blocks, and cached blocks without a reference."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Number of free blocks that still keep their content."""
        return len(self._cached)

    def refs(self, block: int) -> int:
        """Return the number of references to a block."""
        return self._refs[block]

    def key(self, block: int) -> bytes | None:
        """Return the key that a block is indexed under; None when it has none."""
        return self._keys[block]

    def num_free_among(self, blocks: Sequence[int]) -> int:
        """Return the number of free blocks in `blocks`. `share` lowers `num_free` by this number."""
        refs = self._refs
        return sum([refs[block] == 0 for block in blocks])

    def take(self, num: int) -> list[int]:
        """Return `num` blocks with one reference each and no key. The caller has checked `num_free`."""
        assert 0 <= num <= self.num_free, f"{num} blocks wanted, {self.num_free} free"
        blank = self._blank
        if num <= len(blank):
            cut = len(blank) - num
            taken = blank[cut:]
            del blank[cut:]
            taken.reverse()
        else:
            taken = blank[::-1]
            blank.clear()
            self._evict(num - len(taken), taken)
        refs = self._refs
        for block in taken:
            refs[block] = 1
        return taken

    def _evict(self, num: int, into: list[int]) -> None:
        for _ in range(num):
            block, _ = self._cached.popitem(last=False)
            self._drop_key(block, "evicted")
            into.append(block)
        self.evictions += num

    def _drop_key(self, block: int, why: str) -> None:
        key = self._keys[block]
        assert key is not None
        for tell in self.on_drop:
            tell(key, why)
        del self._index[key]
        self._keys[block] = None
        self.generation += 1

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block. A free block must have a key: a blank block has no content to share."""
        refs = self._refs
        for block in blocks:
            if refs[block] == 0:
                del self._cached[block]
            refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one reference from each block in `blocks`, a part of a block table in order.

        The end of a sequence is evicted before its beginning, because more requests can match the beginning.
        """
        refs, keys, blank, cached = self._refs, self._keys, self._blank, self._cached
        for block in reversed(blocks):
            left = refs[block] - 1
            assert left >= 0, f"block {block} released more often than held"
            refs[block] = left
            if left == 0:
                if keys[block] is None:
                    blank.append(block)
                else:
                    cached[block] = None

    def publish(self, block: int, key: bytes) -> bool:
        """Index a held block under `key`. Returns False when another block already has the key and keeps it."""
        assert self._refs[block] > 0, f"block {block} is not held"
        if self._index.setdefault(key, block) != block:
            return False
        known = self._keys[block]
        if known is None:
            self._keys[block] = key
            for tell in self.on_publish:
                tell(block, key)
        assert known is None or known == key, f"block {block} is full and immutable, its key cannot change"
        return True

    def demote(self, block: int) -> None:
        """Let a block be the first to be evicted, if nobody holds it."""
        if block in self._cached:
            self._cached.move_to_end(block, last=False)

    def next_evicted(self, num: int) -> list[int]:
        """Return the blocks whose content `take(num)` would evict now, the first one first."""
        return list(islice(self._cached, max(0, num - len(self._blank))))

    def lookup(self, key: bytes) -> int | None:
        """Return the block with this key, held or free; None when there is none."""
        return self._index.get(key)

    def forget(self, blocks: Sequence[int]) -> None:
        """Drop the keys of `blocks`, because their content cannot be trusted. Blocks without a key are skipped."""
        for block in blocks:
            if self._keys[block] is not None:
                self._drop_key(block, "distrusted")
                if self._refs[block] == 0:
                    del self._cached[block]
                    self._blank.append(block)

    def reset(self) -> bool:
        """Forget the content of all blocks, so that no prefix is reused. Returns True when no request holds a block.

        False: all is forgotten, too, but the request that holds a block may make its content known again.
        """
        for tell in self.on_drop:
            for key in self._index:
                tell(key, "reset")
        self._index.clear()
        self._keys = [None] * (self.num_blocks + 1)
        self._blank.extend(reversed(self._cached))
        self._cached.clear()
        self.generation += 1
        return self.num_free == self.num_blocks

    def check(self) -> None:
        """Assert every invariant; O(num_blocks)."""
        refs, keys = self._refs, self._keys
        everything = set(range(1, self.num_blocks + 1))
        held = {block for block in everything if refs[block] > 0}
        blank = set(self._blank)
        assert len(blank) == len(self._blank), "a block is twice on the blank stack"
        assert not (blank & self._cached.keys()), "a block is both blank and cached"
        assert blank | self._cached.keys() == everything - held, "a block is neither held nor free, or both"
        assert refs[NULL_BLOCK] == 0 and keys[NULL_BLOCK] is None, "the reserved block was used"
        assert all(refs[block] >= 0 for block in everything), "a reference count is negative"
        assert all(keys[block] is None for block in blank), "a blank block has a key"
        assert all(keys[block] is not None for block in self._cached), "a cached block has no key"
        by_block = {key: block for block, key in enumerate(keys) if key is not None}
        assert by_block == self._index, "index and keys of the blocks differ"
        assert len(by_block) == sum(key is not None for key in keys), "two blocks have one key"
