"""The plan of a step's attention on a GPU: work lists for its programs.

A kernel writes the lists once per step, from lengths that only the device knows; the host knows the sizes of the lists.
All layers with the same heads and window share a plan.

Sequences with at most `limit` rows are decodes: their context is cut into items, small enough to fill the GPU and to
balance sequences of different lengths. Other sequences are cut into tiles of query rows, the longest contexts first. If
a step has few tiles, the long contexts before them are divided: several programs compute a tile, each for a part of the
keys. The plan also owns the scratch for parts. Knows nothing of keys and values.

A plan belongs to its AttentionMeta: a new step, a warm-up or a captured graph needs a new AttentionMeta, since a plan
found in `AttentionMeta.plans` is used without launching the plan's kernel again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.contracts.step import I32, SharedPrefix
from quire.kernels.attention import AttentionMeta, SharedBlocks, as_list, padded
from quire.kernels.attention_limits import MOST_SEQUENCES
from quire.kernels.triton_runtime import INTERPRETED, jit, tl

MAX_PARTS = 32  # most items of a sequence, by default
ITEM_WORDS, TILE_WORDS = 16, 12
TABLE_ROW, SEQUENCE = 3, 4  # words of a tile, see `Plan.tiles`
WIDTHS = (64, 256, 1024, MOST_SEQUENCES)  # the plan's kernel is compiled for steps of at most so many sequences
PREFIX_ROWS = 64  # rows of a tile over a shared prefix
LEAST_KEYS = 1024  # of a part of a divided context: its start and its sums cost about as much as 500 keys
DIVIDED_WAVES = 3  # parts of divided contexts: at most so many times the programs that run at the same time


def pack_shared(
    shared: Sequence[SharedPrefix], slots: I32, num_tokens: I32, *, num_groups: int, most_seqs: int, decode_len: int = 1
) -> I32:
    """Pack the shared prefixes of a step plan (groups of sequences) into one array, which `SharedBlocks.view` reads.

    slots, num_tokens   fields of the step plan: slot and number of query tokens of each sequence
    num_groups          largest number of groups to pack; the groups that save the most reads are taken
    most_seqs           largest number of sequences of a step
    decode_len          only sequences with at most so many query tokens are packed, in groups of at least two
    """
    index = {int(slot): s for s, slot in enumerate(slots)}
    found = [
        (
            [s for s in (index.get(int(slot), -1) for slot in group.slots) if s >= 0 and num_tokens[s] <= decode_len],
            group.num_blocks,
        )
        for group in shared
    ]
    found = [(members, blocks) for members, blocks in found if len(members) > 1 and blocks]
    found.sort(key=lambda entry: -len(entry[0]) * entry[1])
    packed = np.zeros(SharedBlocks.words(num_groups, most_seqs), np.int32)
    starts, members_of, place, blocks_of = np.split(packed, padded(num_groups + 1) + padded(most_seqs) * np.arange(3))
    place[:] = -1
    count = 0
    for g in range(num_groups):
        for s in found[g][0] if g < len(found) else []:
            if place[s] < 0:
                members_of[count], place[s], blocks_of[s] = s, count, found[g][1]
                count += 1
        starts[g + 1] = count
    return packed


@dataclass(frozen=True)
class Shape:
    """Parameters of a plan that do not depend on the step.

    heads          number of query heads
    group          number of query heads that share a KV head
    window         as WINDOW of `triton_tiles`
    tile           keys per iteration of the decode kernel
    tile_rows      query rows of a tile of the prefill kernel: tokens times query heads of a KV head
    programs       programs of the decode kernel that run on a multiprocessor at the same time
    parts          largest number of parts (items) into which a sequence's context is cut
    prefix         for shared prefixes: (rows of a tile, programs on a multiprocessor at the same time, most parts)
    dividing       programs of the prefill kernel that run on a multiprocessor at the same time, if they may divide the
                   contexts of tiles of query rows; 0: each tile is computed by one program
    """

    heads: int
    group: int
    head_dim: int
    block_size: int
    window: int
    tile: int
    tile_rows: int
    programs: int = 2
    parts: int = MAX_PARTS
    prefix: tuple[int, int, int] = (PREFIX_ROWS, 2, 16)
    dividing: int = 0


@dataclass(frozen=True)
class Plan:
    """Work lists and scratch memory of the attention kernels in a step.

    limit          sequences with at most this many rows are decodes
    items          [I, ITEM_WORDS] int32, parts of the contexts of decodes; words of an item:
                   0 first row (-1: no work), 1 rows, 2 context length, 3 first token, 4 end of tokens,
                   5 number of parts of the sequence, 6 index of its first part, 7 row of the block tables,
                   8 number of parts of its shared prefix, 9 index of the first of these,
                   10 for sequence i (not item i): its first part if several parts are to be added, else -1
    tiles          [J, TILE_WORDS] int32, tiles of rows of other sequences, longest contexts first; words of a tile:
                   0 first row (-1: no work), 1 rows, 2 position of the first row, 3 row of the block tables,
                   4 sequence of the step, 5 number of tiles, and if contexts may be divided:
                   6 part of the context, 7 number of parts, 8 index of the part in `divided` (-1: there is one part).
                   The parts of a tile follow each other, here and in `divided`
    counters       [I, Hkv] int32: number of finished parts of a sequence, at its first part's index; 0 between launches
    sums           [P, Hkv, rows, D] float32: weighted sums of values of each part
    stats          [P, Hkv, rows, 2] float32: maximum score (base 2) and sum of weights of each part
    shared         groups of decodes with a common prefix that are read once; None: no groups
    prefix_parts   number of parts of a shared prefix. Parts 0 .. I - 1 are the items; after them, each member of a
                   group has prefix_parts parts
    divided        [N] int32: the index in `tiles` of each part of a divided context, -1 after the last; [0]: the shape
                   forbids divisions
    tile_sums      [N, Hkv, tile rows, D] float32: weighted sums of values of each of these parts
    tile_stats     [N, Hkv, tile rows, 2] float32: maximum score (base 2) and sum of weights of each of these parts
    """

    limit: int
    items: Tensor
    tiles: Tensor
    counters: Tensor
    sums: Tensor
    stats: Tensor
    shared: SharedBlocks | None
    prefix_parts: int
    divided: Tensor
    tile_sums: Tensor
    tile_stats: Tensor


def plan_step(meta: AttentionMeta, shape: Shape, num_rows: int) -> Plan:
    """Return the plan of a step of `num_rows` rows; `meta.plans` keeps it for layers of the same `shape`."""
    plans = meta.plans.setdefault(shape.block_size, {})
    assert isinstance(plans, dict)
    if shape not in plans:
        plans[shape] = _make(meta, shape, num_rows)
    return plans[shape]


def _make(meta: AttentionMeta, shape: Shape, num_rows: int) -> Plan:
    assert isinstance(meta.query_start, Tensor) and isinstance(meta.seq_lens, Tensor)
    device, num_seqs = meta.seq_lens.device, len(meta.seq_lens)
    limit, mixed = _limit(meta)
    kv_heads = shape.heads // shape.group
    waves = -(-shape.programs * multiprocessors() // kv_heads)
    num_items = min(shape.parts * num_seqs, num_seqs + 2 * waves) if limit else 0
    tile_tokens = shape.tile_rows // shape.group
    tile_waves = shape.dividing * multiprocessors()
    num_divided = -(-DIVIDED_WAVES * tile_waves // (4 * kv_heads)) * 4 if mixed else 0  # all lists begin at 16 bytes
    num_tiles = num_rows // tile_tokens + num_seqs + num_divided if mixed else 0
    shared = meta.shared if limit and not shape.window else None
    prefix_parts = _prefix_parts(shared, limit, shape) if shared is not None else 0
    num_parts = num_items + (len(shared.members) * prefix_parts if shared is not None else 0)
    words = num_items * ITEM_WORDS + num_tiles * TILE_WORDS
    lists = torch.empty(words + num_items * kv_heads + num_divided, dtype=torch.int32, device=device)
    items, tiles, divided, counters = lists.split(
        [num_items * ITEM_WORDS, num_tiles * TILE_WORDS, num_divided, num_items * kv_heads]
    )
    partial, of_tiles = (num_parts, kv_heads, limit * shape.group), (num_divided, kv_heads, shape.tile_rows)
    plan = Plan(
        limit=limit,
        items=items.view(num_items, ITEM_WORDS),
        tiles=tiles.view(num_tiles, TILE_WORDS),
        counters=counters,
        sums=torch.empty(*partial, shape.head_dim, dtype=torch.float32, device=device),
        stats=torch.empty(*partial, 2, dtype=torch.float32, device=device),
        shared=shared,
        prefix_parts=prefix_parts,
        divided=divided,
        tile_sums=torch.empty(*of_tiles, shape.head_dim, dtype=torch.float32, device=device),
        tile_stats=torch.empty(*of_tiles, 2, dtype=torch.float32, device=device),
    )
    _fill(plan, meta, shape, tile_tokens, waves)
    return plan


def _limit(meta: AttentionMeta) -> tuple[int, bool]:
    """Return the most rows of a decode, and True if the step may have longer sequences."""
    longest = meta.max_query_len
    if longest is None:
        starts = as_list(meta.query_start)
        longest = max(b - a for a, b in zip(starts, starts[1:], strict=False))
    return (max(1, longest), False) if longest <= meta.decode_len else (meta.decode_len, True)


def _prefix_parts(shared: SharedBlocks, limit: int, shape: Shape) -> int:
    """Return the number of parts of a shared prefix that fills the GPU once."""
    rows, programs, most = shape.prefix
    tiles = -(-len(shared.members) * limit * shape.group // rows)
    return max(1, min(most, programs * multiprocessors() // (tiles * (shape.heads // shape.group))))


def _fill(plan: Plan, meta: AttentionMeta, shape: Shape, tile_tokens: int, waves: int) -> None:
    num_seqs = len(meta.seq_lens)
    width = next(w for w in WIDTHS if w >= num_seqs)
    block = max(1, min(32, 8192 // width))  # entries per program, which each count all sequences
    num_items, num_tiles = len(plan.items), len(plan.tiles)
    item_programs = -(-num_items // block)
    shared = plan.shared
    _plan_kernel[(item_programs + -(-num_tiles // block),)](
        meta.query_start,
        meta.seq_lens,
        meta.table_rows,
        None if shared is None else shared.place,
        None if shared is None else shared.blocks,
        plan.items,
        plan.tiles,
        plan.counters,
        num_seqs,
        num_items,
        num_tiles,
        item_programs,
        waves,
        plan.limit,
        tile_tokens,
        plan.prefix_parts,
        plan.divided if len(plan.divided) else None,
        len(plan.divided),
        shape.dividing * multiprocessors(),
        TILE=shape.tile,
        WINDOW=shape.window,
        SIZE=shape.block_size,
        PARTS=min(shape.parts, max(2, 128 * shape.parts // width)),
        SHARED=shared is not None,
        HEADS=shape.heads // shape.group,
        WIDTH=width,
        BLOCK=block,
        ITEM_WORDS=ITEM_WORDS,
        TILE_WORDS=TILE_WORDS,
        LEAST=LEAST_KEYS,
        num_warps=4 if width <= 256 else 8,
    )


@functools.cache
def multiprocessors() -> int:
    """Return the number of multiprocessors of this GPU; 8 in Triton's interpreter, to cut small test cases, too."""
    if INTERPRETED:
        return 8
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@functools.cache
def shared_memory() -> int:
    """Return the most bytes of shared memory that a program can have on this GPU.

    In Triton's interpreter it is 99 KiB, as on the smallest GPUs of compute capability 8.x.
    """
    if INTERPRETED:
        return 99 << 10
    return torch.cuda.get_device_properties(torch.cuda.current_device()).shared_memory_per_block_optin


def unspecialized(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator like `triton.jit`, which does not specialize the kernel on values of the arguments `names`."""
    return functools.partial(jit, do_not_specialize=names) if tl is not None else jit


@jit
def _span(length, rows, tokens, limit, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Return the first token that a sequence reads itself, and True if it is a decode.

    tokens   tokens of its shared prefix, which another kernel reads. If one of its rows lies before the last of them,
             the sequence reads all of its context itself
    """
    decodes = (rows > 0) & (rows <= limit)
    first = tl.where(length - rows >= tokens - 1, tokens, 0)
    if WINDOW > 0:
        first = tl.maximum(length - rows - WINDOW + 1, 0) // TILE * TILE
    if WINDOW < 0:
        first = (length - rows) // -WINDOW * -WINDOW // TILE * TILE
    return first, decodes


# Integers of a step: a value of 1 or a multiple of 16 must not make Triton compile the kernel again.
@unspecialized(
    "num_seqs",
    "num_items",
    "num_tiles",
    "item_programs",
    "waves",
    "limit",
    "tile_tokens",
    "prefix_parts",
    "num_divided",
    "tile_waves",
)
def _plan_kernel(
    query_start,
    seq_lens,
    table_rows,
    place,
    blocks,
    items,
    tiles,
    counters,
    num_seqs,
    num_items,
    num_tiles,
    item_programs,
    waves,
    limit,
    tile_tokens,
    prefix_parts,
    divided,
    num_divided,
    tile_waves,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    SHARED: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ITEM_WORDS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Write the work lists of a step. Grid: item_programs programs of BLOCK items, then programs of BLOCK tiles.

    query_start, seq_lens, table_rows    [S + 1], [S] and [S] int32, of `AttentionMeta`; table_rows may be None
    place, blocks                        [S] int32, of `SharedBlocks`; None unless SHARED
    items, tiles, counters               of `Plan`, outputs; num_items, num_tiles  their lengths
    num_seqs, WIDTH                      sequences S; a bound that is a power of two
    waves                                items per KV head that run at the same time
    limit                                most rows of a decode
    tile_tokens                          tokens of a tile of query rows
    prefix_parts                         parts of a shared prefix
    divided, num_divided                 of `Plan`, output, and its length; None: contexts are not divided among tiles
    tile_waves                           programs of the prefill kernel that run at the same time
    TILE                                 keys of an iteration of a decode
    PARTS                                most items of a sequence, and most parts of a tile
    LEAST                                fewest keys of a part of a tile's context
    WINDOW, SIZE, HEADS                  as in `triton_tiles`; tokens of a block; KV heads
    ITEM_WORDS, TILE_WORDS               words of an item; of a tile
    """
    program = tl.program_id(0)
    seqs = tl.arange(0, WIDTH)
    real = seqs < num_seqs
    rows = tl.load(query_start + seqs + 1, mask=real, other=0) - tl.load(query_start + seqs, mask=real, other=0)
    if program < item_programs:
        length = tl.load(seq_lens + seqs, mask=real, other=0)
        tokens = tl.zeros_like(length)
        if SHARED:
            tokens = tl.load(blocks + seqs, mask=real, other=0) * SIZE
        first, decodes = _span(length, rows, tokens, limit, WINDOW, TILE)
        counts = tl.where(decodes, tl.maximum(tl.cdiv(length - first, TILE), 1), 0)
        chunk = _choose_chunk(counts, num_items, waves, PARTS)
        parts = tl.cdiv(counts, chunk)
        entry = program * BLOCK + tl.arange(0, BLOCK)
        seq, base, total = _locate(parts, entry)
        _write_items(
            query_start,
            seq_lens,
            table_rows,
            place,
            blocks,
            items,
            entry,
            seq,
            base,
            chunk,
            entry < total,
            num_items,
            limit,
            prefix_parts,
            TILE,
            WINDOW,
            SIZE,
            SHARED,
            ITEM_WORDS,
        )
        if program == 0:
            several = parts > 1
            if SHARED:
                several = several | (decodes & (first > 0))
            tl.store(items + seqs * ITEM_WORDS + 10, tl.where(several, tl.cumsum(parts, 0) - parts, -1), mask=real)
        for head in tl.static_range(HEADS):
            tl.store(counters + entry * HEADS + head, 0, mask=entry < num_items)
    else:
        entry = (program - item_programs) * BLOCK + tl.arange(0, BLOCK)
        length = tl.load(seq_lens + seqs, mask=real, other=0)
        counts = tl.where(rows > limit, tl.cdiv(rows, tile_tokens), 0)
        parts, keys = tl.full([WIDTH], 1, tl.int32), 0
        if divided is not None:
            sees = _fewest_keys(length, rows, tile_tokens, WINDOW)
            keys = _choose_keys(counts, sees, num_divided, tile_waves, HEADS, LEAST, PARTS)
            parts = _count_parts(sees, keys, LEAST)
        seq, base, total = _locate(counts * parts, entry)
        live = entry < total
        seq = tl.where(live, seq, 0)
        start = tl.load(query_start + seq)
        count = tl.load(query_start + seq + 1) - start
        past = tl.load(seq_lens + seq) - count
        num_parts = tl.full([BLOCK], 1, tl.int32)
        if divided is not None:
            num_parts = _count_parts(_fewest_keys(past + count, count, tile_tokens, WINDOW), keys, LEAST)
        part = (entry - base) % num_parts
        offset = (entry - base) // num_parts * tile_tokens
        row = seq
        if table_rows is not None:
            row = tl.load(table_rows + seq)
        end = past + tl.minimum(offset + tile_tokens, count)
        later = _later_tiles(seqs, counts, parts, length, length - rows, seq, end, tile_tokens)
        rank = tl.where(live, later + part, entry)
        record = tiles + rank * TILE_WORDS
        inside = entry < num_tiles
        tl.store(record, tl.where(live, start + offset, -1), mask=inside)
        tl.store(record + 1, tl.minimum(count - offset, tile_tokens), mask=inside)
        tl.store(record + 2, past + offset, mask=inside)
        tl.store(record + 3, row, mask=inside)
        tl.store(record + 4, seq, mask=inside)
        tl.store(record + 5, total, mask=inside)
        if divided is not None:
            several = tl.where(parts > 1, counts * parts, 0)
            before = tl.sum(tl.where(seqs[None, :] < seq[:, None], several[None, :], 0), 1)
            place_of = tl.where(num_parts > 1, before + entry - base, -1)
            tl.store(record + 6, part, mask=inside)
            tl.store(record + 7, num_parts, mask=inside)
            tl.store(record + 8, place_of, mask=inside)
            tl.store(divided + place_of, rank, mask=live & (place_of >= 0))
            tl.store(divided + entry, -1, mask=(entry >= tl.sum(several, 0)) & (entry < num_divided))


@jit
def _fewest_keys(length, rows, tile_tokens, WINDOW: tl.constexpr):
    """Return the number of keys that the first tile of a sequence sees; its other tiles see at least as many.

    With attention in chunks it is the most that the first tile may see. A tile that sees fewer has empty parts.
    """
    sees = length - rows + tl.minimum(rows, tile_tokens)
    if WINDOW > 0:
        sees = tl.minimum(sees, WINDOW)
    if WINDOW < 0:
        sees = tl.minimum(sees, -WINDOW)
    return sees


@jit
def _count_parts(sees, keys, LEAST: tl.constexpr):
    """Return the number of parts of the contexts of a sequence's tiles: each has about `keys`, and at least LEAST keys.

    sees   result of `_fewest_keys`
    """
    return tl.maximum(tl.minimum(tl.cdiv(sees, keys), sees // LEAST), 1)


@jit
def _choose_keys(counts, sees, num_divided, programs, HEADS: tl.constexpr, LEAST: tl.constexpr, PARTS: tl.constexpr):
    """Return the best number of keys of a part of a context.

    counts, sees    [WIDTH] tiles of each sequence, and the result of `_fewest_keys`
    num_divided     most parts of divided contexts
    programs        programs that run at the same time
    HEADS, PARTS    KV heads; most parts of a context

    The time has two upper bounds; the lower counts. Parts that are more than half as large as the largest take
    rounds of `programs`, and smaller ones fill gaps. Or all programs have equal work, and the largest part more.
    The start of a part costs as much as a quarter of LEAST keys; adding up parts, if there are any, as much as a half.
    """
    sees = tl.where(counts > 0, sees, 0)
    longest = tl.maximum(tl.max(sees, 0), 1)
    keys = tl.maximum(tl.cdiv(longest, 1 + tl.arange(0, PARTS)), LEAST)
    parts = _count_parts(sees[:, None], keys[None, :], LEAST)
    size, pieces = tl.cdiv(sees[:, None], parts), counts[:, None] * parts
    largest = tl.max(tl.where(counts[:, None] > 0, size, 0), 0)
    large = 2 * size > largest[None, :]
    rounds = tl.cdiv(tl.sum(tl.where(large, pieces, 0), 0) * HEADS, programs)
    work = pieces.to(tl.float32) * (size + LEAST // 4) * HEADS / programs
    several = tl.sum(tl.where(parts > 1, pieces, 0), 0)
    cost = rounds * (largest + LEAST / 4) + tl.sum(tl.where(large, 0.0, work), 0)
    cost = tl.minimum(cost, tl.sum(work, 0) + largest) + tl.where(several > 0, LEAST / 2, 0.0)
    cost = tl.where(several <= num_divided, cost, float("inf"))
    return tl.max(tl.where(cost == tl.min(cost, 0), keys, 1), 0)


@jit
def _later_tiles(seqs, counts, parts, length, past, seq, end, tile_tokens):
    """Return the rank of tiles: the number of parts of tiles of the step that end later in their context than at `end`.

    Such tiles see more keys, so they come first. Among equal ends the tile of the earlier sequence comes first.

    seqs, counts, parts, length, past   [WIDTH] of all sequences: number, tiles, parts of each tile's context, context
                                        length, tokens before this step
    seq, end                            [BLOCK] of the tiles to rank: sequence, end in its context
    """
    above = end[:, None] - (seqs[None, :] < seq[:, None]) - past[None, :]
    whole = counts[None, :] - 1  # tiles before a sequence's last one, which may be short
    full = tl.maximum(whole - tl.maximum(above, 0) // tile_tokens, 0)
    last = ((counts > 0)[None, :] & ((length - past)[None, :] > above)).to(tl.int32)
    return tl.sum((full + last) * parts[None, :], 1)


@jit
def _choose_chunk(counts, num_items, waves, PARTS: tl.constexpr):
    """Return the best number of tiles of keys per item. The start of an item costs as much as two tiles.

    counts      [WIDTH] tiles of keys of each decode
    num_items   most items;  waves  items per KV head that run at the same time
    PARTS       most items of a sequence

    If all items run at the same time, the cost is that of the largest. Else it is the mean work of a program, and half
    an item at the end, while other programs have no work left.
    """
    longest = tl.maximum(tl.max(counts, 0), 1)
    chunks = tl.cdiv(longest, 1 + tl.arange(0, PARTS))
    items = tl.sum(tl.cdiv(counts[:, None], chunks[None, :]), 0)
    total = tl.sum(counts, 0)
    cost = tl.where(items <= waves, chunks + 2.0, (total + 2.0 * items) / waves + 0.5 * chunks)
    cost = tl.where((items <= num_items) | (chunks == longest), cost, float("inf"))
    return tl.max(tl.where(cost == tl.min(cost, 0), chunks, 1), 0)


@jit
def _locate(parts, entry):
    """Find the sequence of each entry, if sequence s has parts[s] entries one after the other.

    Returns the sequence, its first entry (both [BLOCK]), and the number of entries.
    """
    ends = tl.cumsum(parts, 0)
    before = ends[None, :] <= entry[:, None]
    seq = tl.sum(before.to(tl.int32), 1)
    base = tl.sum(tl.where(before, parts[None, :], 0), 1)
    return seq, base, tl.sum(parts, 0)


@jit
def _write_items(
    query_start,
    seq_lens,
    table_rows,
    place,
    blocks,
    items,
    entry,
    seq,
    base,
    chunk,
    live,
    num_items,
    limit,
    prefix_parts,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SIZE: tl.constexpr,
    SHARED: tl.constexpr,
    ITEM_WORDS: tl.constexpr,
):
    """Write words 0 to 9 of the items `entry` [BLOCK]; see `Plan.items` and `_plan_kernel`.

    seq, base   [BLOCK] sequence of each item, and its first item;  live  the item exists
    chunk       most tiles of keys of an item
    """
    seq = tl.where(live, seq, 0)
    start = tl.load(query_start + seq)
    rows = tl.load(query_start + seq + 1) - start
    length = tl.load(seq_lens + seq)
    tokens = tl.zeros_like(length)
    if SHARED:
        tokens = tl.load(blocks + seq) * SIZE
    first, _decodes = _span(length, rows, tokens, limit, WINDOW, TILE)
    count = tl.maximum(tl.cdiv(length - first, TILE), 1)
    parts = tl.cdiv(count, chunk)
    part = entry - base
    row = seq
    if table_rows is not None:
        row = tl.load(table_rows + seq)
    record = items + entry * ITEM_WORDS
    inside = entry < num_items
    tl.store(record, tl.where(live, start, -1), mask=inside)
    tl.store(record + 1, rows, mask=inside)
    tl.store(record + 2, length, mask=inside)
    tl.store(record + 3, first + part * count // parts * TILE, mask=inside)
    tl.store(record + 4, tl.minimum(first + (part + 1) * count // parts * TILE, length), mask=inside)
    tl.store(record + 5, parts, mask=inside)
    tl.store(record + 6, base, mask=inside)
    tl.store(record + 7, row, mask=inside)
    if SHARED:
        shares = (first > 0) & live
        tl.store(record + 8, tl.where(shares, prefix_parts, 0), mask=inside)
        tl.store(record + 9, num_items + tl.load(place + seq) * prefix_parts, mask=inside)
