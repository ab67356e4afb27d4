"""Shards of KV blocks: the layers and heads of each block that a rank holds, and where they lie in its pages.

Engines that divide a model differently give a block the same key. Their pages differ: a rank reads the byte ranges of
its own layers and heads from the pages of the ranks that hold them, and puts them together. Latents are the same on all
ranks of a stage: each rank reads a whole one. A page holds no scales, so a quantized cache is cut like another one.
Knows layouts and files of host memory. Knows nothing of keys, connections and devices.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import msgspec

from quire.contracts.blocks import KVGeometry
from quire.contracts.errors import ConfigError
from quire.kernels.mapped import ExportedPages


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """The part of each block that a rank holds.

    geometry   layout of its pages
    layer      number in the model of its first layer
    heads      number in the model of its first KV head, by KV group;  draft_heads  in the draft model or EAGLE head
    file       path of its host memory [num_pages, page_bytes], for processes of this host; "": it is not shared
    token      first bytes of that memory, by which the right file is known
    states     True: it is the part of checkpoints of states, each a block of one component with one head
    memory     its KV cache on the device, for processes of this machine; None: it is not shared
    place      host and port where the rank, on another host than its engine core's, serves its host memory; None: the
               core serves it
    """

    geometry: KVGeometry
    layer: int = 0
    heads: tuple[int, ...] = (0,)
    draft_heads: tuple[int, ...] = (0,)
    file: str = ""
    token: bytes = b""
    states: bool = False
    memory: ExportedPages | None = None
    place: tuple[str, int] | None = None


class Range(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a rank's page.

    rank, start, length   where they are read
    target                where they are put in the reader's page
    """

    rank: int
    start: int
    length: int
    target: int

    def of(self, page: memoryview) -> memoryview:
        """Return the part of the reader's page that these bytes fill."""
        return page[self.target : self.target + self.length]


class _Piece(NamedTuple):
    """Heads [first, end) of a component of a layer, `size` bytes each, from byte `start` of a page on."""

    name: tuple[int, str]
    first: int
    end: int
    start: int
    size: int


@lru_cache(maxsize=64)
def cut(mine: Shard, theirs: tuple[Shard, ...]) -> tuple[tuple[Range, ...], ...]:
    """Return the ranges of the pages of `theirs`, all ranks of an engine, that make up a page of `mine`, by KV group.

    A group without layers on this rank has none. Raises ConfigError if ranges are missing.
    """
    for rank, shard in enumerate(theirs):
        same = {"file": mine.file, "token": mine.token, "memory": mine.memory, "place": mine.place}
        if msgspec.structs.replace(shard, **same) == mine:
            return ((Range(rank, 0, mine.geometry.page_bytes, 0),),) * len(mine.geometry.groups)
    return tuple(_joined(_ranges(mine, theirs, index)) for index in range(len(mine.geometry.groups)))


def place_layers(geometry: KVGeometry) -> dict[int, list[int]]:
    """Return layer -> byte offset of each of its components in the page."""
    places: dict[int, list[int]] = {}
    for group in geometry.groups:
        at = 0
        for layer in group.layers:
            assert layer not in places, f"layer {layer} is in two groups"
            places[layer] = []
            for component in group.of(layer):
                places[layer].append(at)
                at += component.num_bytes(group.entries)
    return places


def packed_ranges(ranges: Sequence[Range]) -> tuple[list[Range], int]:
    """Return ranges whose bytes are put one behind the other, and the number of these bytes."""
    starts = [*accumulate((one.length for one in ranges), initial=0)]
    placed = [msgspec.structs.replace(one, target=at) for one, at in zip(ranges, starts, strict=False)]
    return placed, starts[-1]


class PageFiles(ExitStack):
    """Host memory of ranks on this host, to be read until the end of a `with` block."""

    def open(self, shards: Sequence[Shard], ranges: Sequence[Range]) -> None:
        """Open the memory of the ranks in `ranges`, which are read. Raises OSError, and ValueError for wrong ranges."""
        sizes = [shard.geometry.page_bytes for shard in shards]
        inside = all(
            0 <= one.rank < len(sizes) and 0 <= one.start < one.start + one.length <= sizes[one.rank] for one in ranges
        )
        if not inside or sum(one.length for one in ranges) > sum(sizes):
            raise ValueError("ranges outside of a page")
        files: dict[int, int] = {}
        for rank in sorted({one.rank for one in ranges}):
            files[rank] = os.open(shards[rank].file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self.callback(os.close, files[rank])
            if not (token := shards[rank].token) or os.pread(files[rank], len(token), 0) != token:
                raise OSError(f"{shards[rank].file} is another file")
        self._parts = [(one, files[one.rank], sizes[one.rank]) for one in ranges]

    def read(self, block: int, page: memoryview) -> None:
        """Read the ranges of a block into `page`."""
        for one, file, size in self._parts:
            os.preadv(file, [one.of(page)], block * size + one.start)


def _pieces(shard: Shard, index: int) -> Iterator[_Piece]:
    """Yield the parts of a page of group `index`, in the order of its bytes."""
    places, group = place_layers(shard.geometry), shard.geometry.groups[index]
    for layer in group.layers:
        first = (shard.draft_heads if group.is_draft(layer) else shard.heads)[index]
        for part, start in zip(group.of(layer), places[layer], strict=True):
            size = group.entries * part.head_dim * part.item_bytes
            yield _Piece((shard.layer + layer, part.name), first, first + part.num_heads, start, size)


def _ranges(mine: Shard, theirs: Sequence[Shard], index: int) -> Iterator[Range]:
    """Yield the ranges of a page of group `index`, in the order of its bytes."""
    held: dict[tuple[int, str], list[tuple[int, _Piece]]] = {}
    for rank, shard in enumerate(theirs):
        for piece in _pieces(shard, index):
            held.setdefault(piece.name, []).append((rank, piece))
    for piece in _pieces(mine, index):
        head = piece.first
        while head < piece.end:
            found = next(
                (
                    one
                    for one in held.get(piece.name, ())
                    if one[1].first <= head < one[1].end and one[1].size == piece.size
                ),
                None,
            )
            if found is None:
                raise ConfigError(f"none of its ranks has head {head} of layer {piece.name[0]}: use the same -tp.")
            rank, other = found
            end = min(piece.end, other.end)
            yield Range(
                rank,
                other.start + (head - other.first) * piece.size,
                (end - head) * piece.size,
                piece.start + (head - piece.first) * piece.size,
            )
            head = end


def _joined(ranges: Iterator[Range]) -> tuple[Range, ...]:
    """Join ranges that are neighbours on both sides."""
    joined = list[Range]()
    for one in ranges:
        last = joined[-1] if joined else None
        if last and (one.rank, one.start, one.target) == (
            last.rank,
            last.start + last.length,
            last.target + last.length,
        ):
            joined[-1] = Range(last.rank, last.start, last.length + one.length, last.target)
        else:
            joined.append(one)
    return tuple(joined)
