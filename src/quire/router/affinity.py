"""Remembered prefixes: which backends have seen the beginning of a prompt, as far as this router knows.

A prompt is a chain of hashes, one per chunk, each of which names everything before it; so the table of hashes is a tree
without pointers. Its memory is bounded: the least recently used chunks go, the end of a prompt before its beginning.
It is a guess: a backend may have evicted the blocks. Nothing but speed depends on it.
"""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixTable:
    """Chunks of prompts, each with a bit for every backend that has computed it. At most `limit` chunks."""

    def __init__(self, limit: int) -> None:
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._known, self._limit = 0, limit  # bits of the backends that have seen anything

    def match(self, chunks: Sequence[int]) -> dict[int, int]:
        """Return number of a backend -> leading chunks that it has seen, for those that have seen any."""
        matched: dict[int, int] = {}
        having = self._known
        for depth, chunk in enumerate(chunks):
            still = having & self._seen.get(chunk, 0)
            self._note(matched, having & ~still, depth)
            having = still
            if not having:
                return matched
        self._note(matched, having, len(chunks))
        return matched

    def add(self, chunks: Sequence[int], backend: int) -> None:
        """Remember that a backend computes a prompt."""
        seen = self._seen
        self._known |= 1 << backend
        for chunk in reversed(chunks):  # the beginning last, so that it stays longest
            seen[chunk] = seen.pop(chunk, 0) | 1 << backend
        while len(seen) > self._limit:
            seen.popitem(last=False)

    def forget(self, backend: int) -> None:
        """Forget a backend: it has ended, and its cache with it."""
        bit = 1 << backend
        if not self._known & bit:
            return
        self._known &= ~bit
        for chunk in [chunk for chunk, backends in self._seen.items() if backends & bit]:
            self._seen[chunk] &= ~bit
            if not self._seen[chunk]:
                del self._seen[chunk]

    @staticmethod
    def _note(matched: dict[int, int], backends: int, depth: int) -> None:
        while backends and depth:
            bit = backends & -backends
            matched[bit.bit_length() - 1] = depth
            backends ^= bit
