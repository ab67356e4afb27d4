"""Blocks that running requests read without having them in their block tables: sources of KV at other positions."""

from collections.abc import Iterator

from quire.kv.pool import BlockPool


class Loans:
    """Blocks that slots have borrowed from other requests, to copy their KV approximately. One loan per slot."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: dict[int, list[int]] = {}
        self._num_exact: dict[int, int] = {}

    def begin(self, slot: int, blocks: list[int], num_exact: int) -> None:
        """Hold `blocks` for a slot. Call this before the slot gets blocks of its own, which may evict them.

        num_exact   leading blocks of the slot that other requests may find; all behind them depend on the copies
        """
        self._pool.share(blocks)
        self._blocks[slot], self._num_exact[slot] = blocks, num_exact

    def end(self, slot: int) -> None:
        """Release a slot's borrowed blocks, if any: the plan that is being made copies the last of them."""
        self._pool.release(self._blocks.pop(slot, []))

    def forget(self, slot: int) -> None:
        """End the loan of a slot that becomes empty."""
        self.end(slot)
        self._num_exact.pop(slot, None)

    def exact(self, slot: int, num_blocks: int) -> int:
        """Return how many of a slot's first `num_blocks` blocks other requests may find."""
        return min(num_blocks, self._num_exact.get(slot, num_blocks))

    def blocks(self) -> Iterator[int]:
        """Yield the borrowed blocks, once per loan."""
        for blocks in self._blocks.values():
            yield from blocks
