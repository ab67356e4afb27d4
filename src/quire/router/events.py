"""KV events of backends, in vLLM's form, and the index of blocks that follows from them.

    SUB     [topic, number, batch]   number: 8 bytes, big endian, one more for each batch; batch: msgpack
    batch   [time, events, rank]     or a map of "ts", "events" and "data_parallel_rank"
    event   ["BlockStored", hashes, parent, token ids, block size, adapter id, medium, adapter, extras, group]
            ["BlockRemoved", hashes, medium, group]   ["AllBlocksCleared"]   or a map with "type"
    DEALER  ["", number] asks for the batches from a number on: ["", number, batch] each, at the end number -1

The index knows blocks by their tokens and all tokens before them, hashed by this router: an event names the tokens, so
no engine's hash need be computed here. A lower tier names only hashes, of blocks that the device had before. Blocks
that depend on more than tokens (adapters, salts, images) and those of further KV groups are left out. If events are
lost, the index begins anew.
"""

import asyncio
import logging
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

LOG = logging.getLogger("quire")
MOST_BLOCKS = 2**20  # of a backend, those it has lost included; the oldest are forgotten
REPLAY_SECONDS = 2.0
END = (1 << 64) - 1  # the number that ends a replay, -1
STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)
REMOVED = ("block_hashes", "medium", "group_idx")
FAULTS = (msgspec.DecodeError, TypeError, ValueError, KeyError, IndexError, OverflowError)


class KVIndex:
    """The blocks that a backend holds. `lost`: batches that were missed or not understood."""

    def __init__(self) -> None:
        self.block_size = 0
        self.lost = 0
        self._next: int | None = None  # number of the next batch
        self._held: dict[int, set[str]] = {}  # own hash of a block -> media that hold it
        self._own: dict[Any, int] = {}  # the engine's hash -> own hash

    def __len__(self) -> int:
        return len(self._held)

    def match(self, chain: Sequence[int]) -> int:
        """Return the number of leading blocks of a prompt that the backend holds; see `block_chain`."""
        held = self._held
        return next((depth for depth, block in enumerate(chain) if block not in held), len(chain))

    def clear(self) -> None:
        """Forget all blocks, and the number of the last batch."""
        self._held.clear()
        self._own.clear()
        self._next = None

    def missing(self, number: int) -> int | None:
        """Return the number of the first batch to ask for before batch `number`; None if none is missing."""
        if self._next is None:
            return 0 if number else None
        return self._next if number > self._next else None

    def take(self, number: int, batch: bytes) -> None:
        """Apply a batch. One that is out of order clears the index first; one that is no batch does so, too."""
        if self._next is not None and number != self._next:
            self.lost += 1
            self.clear()
        self._next = number + 1
        try:
            found = msgspec.msgpack.decode(batch)
            for event in found["events"] if isinstance(found, dict) else found[1]:
                self._apply(event)
        except FAULTS as error:
            LOG.debug("a batch of KV events was dropped: %s", error)
            self.lost += 1
            self.clear()

    def _apply(self, event: Any) -> None:
        kind, *values = [event["type"]] if isinstance(event, dict) else event
        names = {"BlockStored": STORED, "BlockRemoved": REMOVED}.get(kind, ())
        fields: dict[str, Any] = event if isinstance(event, dict) else dict(zip(names, values, strict=False))
        if kind == "AllBlocksCleared":
            self._held.clear()
            self._own.clear()
        elif fields.get("group_idx"):
            return
        elif kind == "BlockStored":
            self._store(fields)
        elif kind == "BlockRemoved":
            for engines in fields["block_hashes"]:
                self._remove(engines, fields.get("medium") or "")

    def _store(self, fields: dict[str, Any]) -> None:
        hashes, parent, size = fields["block_hashes"], fields.get("parent_block_hash"), int(fields["block_size"])
        own = 0 if parent is None else self._own.get(parent)
        extras = fields.get("extra_keys") or ()
        if own is None or fields.get("lora_name") or fields.get("lora_id") is not None or any(extras):
            return
        if fields["token_ids"]:
            self.block_size = size
            self._own.update(zip(hashes, block_chain(fields["token_ids"], size, own), strict=True))
        for engines in hashes:
            block = self._own.pop(engines, None)
            if block is not None:
                self._own[engines] = block  # now the newest
                self._held.setdefault(block, set()).add(fields.get("medium") or "")
        while len(self._own) > MOST_BLOCKS:
            self._held.pop(self._own.pop(next(iter(self._own))), None)

    def _remove(self, engines: Any, medium: str) -> None:
        block = self._own.get(engines, 0)  # stays: a lower tier may tell of the block later, without its tokens
        media: set[str] = self._held.get(block, set())
        media.discard(medium)
        if not media:
            self._held.pop(block, None)


def block_chain(tokens: Sequence[int], size: int, parent: int = 0) -> list[int]:
    """Return the own hashes of the full blocks of `size` tokens, after the block with hash `parent` (0: none)."""
    data, chain, step = array("I", tokens).tobytes(), [], size * 4
    for at in range(0, len(data) - step + 1, step):
        parent = hash((parent, data[at : at + step]))
        chain.append(parent)
    return chain


async def follow(index: KVIndex, live: str, lost: str) -> None:
    """Keep an index by the events at the address `live`, until cancelled. `lost`: address for missed ones, or ""."""
    context = zmq.asyncio.Context.instance()
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(live)
        while True:
            parts = await socket.recv_multipart()
            if len(parts) != 3 or len(parts[1]) != 8:
                index.lost += 1
                continue
            number = int.from_bytes(parts[1], "big")
            first = index.missing(number)
            if first is not None and lost:
                await _replay(context, index, lost, first, number)
            index.take(number, parts[2])
    finally:
        socket.close()


async def _replay(context: Any, index: KVIndex, address: str, first: int, before: int) -> None:
    """Apply the batches [first, before), as far as the backend still has them."""
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        async with asyncio.timeout(REPLAY_SECONDS):
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                parts = await socket.recv_multipart()
                number = int.from_bytes(parts[1], "big")
                if number == END:
                    return
                if number < before:
                    index.take(number, parts[2])
    except (TimeoutError, IndexError):
        LOG.debug("no replay of KV events from %s", address)
    finally:
        socket.close()
