"""KV events: the blocks that an engine gets and loses, in vLLM's form, for routers that follow its prefix cache.

    batch   [seconds since the epoch, events, number of the replica]
    event   map of "type" (BlockStored, BlockRemoved, AllBlocksCleared) and the fields of that class
    hash    the last 8 bytes of a block's key, big-endian

A block of the device is told with its tokens and the block before it; a block of host memory (medium CPU) by its hash.
A block that came back from another tier is told when a request takes it. Knows keys and pools, nothing of sockets.
"""

import time
from typing import Any, Protocol

import msgspec

from quire.contracts.adapters import TAG as ADAPTER
from quire.kv.allocator import KVAllocator
from quire.kv.hashing import DIGEST_BYTES, KeyChain, group_keys, group_of
from quire.kv.pool import BlockPool

DEVICE, HOST = "GPU", "CPU"  # vLLM's words, on a CPU, too


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that follow each other, and their tokens; in host memory: any blocks, without tokens."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that a medium has lost."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The end of all blocks, in every medium."""


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Events of a step."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


class EventSink(Protocol):
    """Takes batches, without waiting."""

    def publish(self, batch: EventBatch) -> None:
        """Send a batch to whoever listens."""

    def close(self) -> None:
        """Send no more."""


class EventLog:
    """Listens to the pools of a core and collects events until `flush` sends them."""

    def __init__(self, allocator: KVAllocator, host: BlockPool | None, sink: EventSink, replica: int = 0) -> None:
        self._pool, self._groups = allocator.pool, allocator.groups
        self._sink, self._replica = sink, replica
        self._told: set[bytes] = set()  # keys of device blocks that were told
        self._events: list[Any] = []
        self.adapters: dict[str, str] = {}  # content of an adapter -> its name; of requests that came
        allocator.on_publish.append(self._published)
        allocator.pool.on_drop.append(self._dropped)
        if host is not None:
            host.on_publish.append(self._arrived)
            host.on_drop.append(lambda key, why: self._remove(key, why, HOST))

    def flush(self) -> None:
        """Send the events since the last call as a batch, if there are any."""
        if self._events:
            events, self._events = self._events, []
            self._sink.publish(EventBatch(time.time(), events, self._replica))

    def close(self) -> None:
        """Send what is left, and no more."""
        self.flush()
        self._sink.close()

    def _published(self, chain: KeyChain, first: int, last: int) -> None:
        """Tell of the blocks of each group in [first, last) of a chain that the device has and that were not told."""
        for number, group in enumerate(self._groups):
            size = group.block_size
            at, stop = (index * chain.block_size // size for index in (first, last))
            for index, key in enumerate(group_keys(chain, number, size, stop, at), at):
                if key in self._told or self._pool.lookup(key) is None:
                    self._store(chain, number, at, index)
                    at = index + 1
                else:
                    self._told.add(key)
            self._store(chain, number, at, stop)

    def _store(self, chain: KeyChain, number: int, first: int, last: int) -> None:
        if first >= last:
            return
        size, window = self._groups[number].block_size, self._groups[number].window
        salts = tuple(value for domain, value in chain.tags if domain == "salt")
        contents = (value for domain, value in chain.tags if domain == ADAPTER)
        self._events.append(
            BlockStored(
                block_hashes=list(map(_hash, group_keys(chain, number, size, last, first))),
                parent_block_hash=_hash(group_keys(chain, number, size, first, first - 1)[0]) if first else None,
                token_ids=chain.tokens[first * size : last * size].tolist(),
                block_size=size,
                lora_id=None,
                medium=DEVICE,
                lora_name=next((self.adapters.get(content, content) for content in contents), None),
                group_idx=number,
                extra_keys=[salts if salts and not index else None for index in range(first, last)],
                kv_cache_spec_kind=_kind(window),
                kv_cache_spec_sliding_window=window if window is None or window > 0 else None,
            )
        )

    def _dropped(self, key: bytes, why: str) -> None:
        if key in self._told:
            self._told.discard(key)
            self._remove(key, why, DEVICE)

    def _arrived(self, block: int, key: bytes) -> None:
        last, number = self._events[-1] if self._events else None, group_of(key)
        if isinstance(last, BlockStored) and (last.medium, last.group_idx) == (HOST, number):
            last.block_hashes.append(_hash(key))
        else:
            self._events.append(
                BlockStored(
                    block_hashes=[_hash(key)],
                    parent_block_hash=None,
                    token_ids=[],
                    block_size=self._groups[number].block_size,
                    lora_id=None,
                    medium=HOST,
                    lora_name=None,
                    group_idx=number,
                )
            )

    def _remove(self, key: bytes, why: str, medium: str) -> None:
        last, number = self._events[-1] if self._events else None, group_of(key)
        if why == "reset":
            if not isinstance(last, AllBlocksCleared):
                self._events.append(AllBlocksCleared())
        elif isinstance(last, BlockRemoved) and (last.medium, last.group_idx) == (medium, number):
            last.block_hashes.append(_hash(key))
        else:
            self._events.append(BlockRemoved(block_hashes=[_hash(key)], medium=medium, group_idx=number))


def _kind(window: int | None) -> str:
    """Return vLLM's name of the kind of a KV group. window: see `KVGroup`."""
    if window is None:
        return "full_attention"
    return "sliding_window" if window > 0 else "chunked_local_attention"


def _hash(key: bytes) -> int:
    return int.from_bytes(key[DIGEST_BYTES - 8 : DIGEST_BYTES], "big")
