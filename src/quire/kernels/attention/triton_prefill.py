"""Attention of sequences with many rows (chunks of prompts).

A program computes a tile of the plan: some rows of a sequence with the query heads of a KV head, over their whole
context, or over a part of it. Tiles of keys that no row sees are not read; those that all rows see are not masked. If
contexts were divided, a second kernel adds up their parts, always in the same order.
"""

from __future__ import annotations

from quire.kernels.attention.triton_tiles import LOWEST, attend, load_queries, merge_parts, store_outputs, store_part
from quire.kernels.triton_runtime import jit, tl


@jit
def prefill_kernel(
    q,
    out,
    k,
    v,
    table,
    tiles,
    sinks,
    row_positions,
    stride_q,
    stride_out,
    stride_block,
    stride_head,
    stride_token,
    stride_table,
    scale,
    cap,
    v_scale,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    sums_at,
    stats_at,
    HEADS: tl.constexpr,
    DIVIDED: tl.constexpr,
):
    """Compute attention of a tile of query rows over all or a part of the keys that they see. Grid (tiles, KV heads).

    q, out              [T, H, D] queries and output
    k, v                cache [blocks, KV heads, SIZE, D]
    table               block tables [slots or sequences, blocks] int32
    stride_q, stride_out, stride_table   elements from row to row of q, of out, of table
    stride_block, stride_head, stride_token   elements from block to block, head to head, token to token of the cache
    tiles               `Plan.tiles`, TILE_WORDS words each
    sinks               [H], or None
    row_positions       [T] int64 position of each row; None: the rows of a tile are at consecutive positions
    scale, cap, WINDOW, CAPPED, EXACT, SIZE, TILE, D, DP   see `triton_tiles`
    v_scale             scale of the codes of an 8-bit cache, else None
    HEADS, GROUP        number of KV heads; number of query heads of a KV head
    M                   lanes of a tile: GROUP times its rows
    DIVIDED             True: contexts may be divided; their parts are written to sums_at, stats_at
    sums_at, stats_at   `Plan.tile_sums`, `Plan.tile_stats`, outputs
    """
    head = tl.program_id(1)
    record = tiles + tl.program_id(0) * TILE_WORDS
    row = tl.load(record)
    if row < 0:
        return
    num_rows, position = tl.load(record + 1), tl.load(record + 2)
    k += head * stride_head
    v += head * stride_head
    table += tl.load(record + 3).to(tl.int64) * stride_table
    lane = tl.arange(0, M)
    token = lane // GROUP
    rows, heads, live = row + token, head * GROUP + lane % GROUP, lane < num_rows * GROUP
    last = position + num_rows
    if row_positions is None:
        positions = position + token
    else:
        position = tl.load(row_positions + row).to(tl.int32)
        positions = tl.where(live, tl.load(row_positions + rows, mask=live, other=0).to(tl.int32), position)
        last = tl.max(positions, 0) + 1
    queries = load_queries(q, rows, heads, live, stride_q, D, DP)
    sums = tl.zeros([M, DP], tl.float32)
    top = tl.zeros([M], tl.float32) + LOWEST
    weight = tl.zeros([M], tl.float32)
    first, middle = 0, (position + 1) // TILE * TILE
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // TILE * TILE
        middle = first
    if WINDOW < 0:
        begin = position // -WINDOW * -WINDOW
        first = begin // TILE * TILE
        middle = tl.where((first == begin) & (last <= begin - WINDOW), middle, first)  # all rows see the same chunk
    if DIVIDED:
        part, parts = tl.load(record + 6), tl.load(record + 7)
        steps = tl.cdiv(last - first, TILE)
        last = tl.minimum(first + (part + 1) * steps // parts * TILE, last)
        first += part * steps // parts * TILE
        middle = tl.minimum(tl.maximum(middle, first), last)
    if WINDOW <= 0:
        sums, top, weight = attend(
            queries,
            sums,
            top,
            weight,
            positions,
            k,
            v,
            table,
            first,
            middle,
            stride_block,
            stride_token,
            scale,
            cap,
            False,
            0,
            CAPPED,
            EXACT,
            SIZE,
            TILE,
            D,
            DP,
        )
    sums, top, weight = attend(
        queries,
        sums,
        top,
        weight,
        positions,
        k,
        v,
        table,
        middle,
        last,
        stride_block,
        stride_token,
        scale,
        cap,
        True,
        WINDOW,
        CAPPED,
        EXACT,
        SIZE,
        TILE,
        D,
        DP,
    )
    if v_scale is not None:
        sums *= v_scale
    if DIVIDED:
        if tl.load(record + 7) > 1:
            at = (tl.load(record + 8).to(tl.int64) * HEADS + head) * M + lane
            store_part(sums_at, stats_at, sums, top, weight, at, live, D, DP)
        else:
            store_outputs(out, sums, top, weight, sinks, rows, heads, live, stride_out, D, DP)
    else:
        store_outputs(out, sums, top, weight, sinks, rows, heads, live, stride_out, D, DP)


@jit
def merge_kernel(
    out,
    tiles,
    divided,
    sums_at,
    stats_at,
    sinks,
    stride_out,
    D: tl.constexpr,
    DP: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Add up the parts of divided contexts. Grid (entries of `divided`, KV heads, SHARES).

    The programs of a tile's parts share its lanes, so that all multiprocessors add.

    out, stride_out     [T, H, D] output, and elements from row to row
    tiles, divided, sums_at, stats_at   `Plan.tiles`, `Plan.divided`, `Plan.tile_sums`, `Plan.tile_stats`
    sinks               [H], or None
    D, DP               size of a head; padded to a power of two
    HEADS, GROUP        number of KV heads; number of query heads of a KV head
    M                   lanes of a tile
    PARTS               upper bound of the parts of a tile
    LANES               lanes that a program adds at the same time
    """
    index = tl.load(divided + tl.program_id(0))
    if index < 0:
        return
    head, record = tl.program_id(1), tiles + index * TILE_WORDS
    row, num_rows, part = tl.load(record), tl.load(record + 1), tl.load(record + 6)
    parts, place = tl.load(record + 7), tl.load(record + 8)
    share, lanes = part * SHARES + tl.program_id(2), num_rows * GROUP
    end = (share + 1) * lanes // (parts * SHARES)
    for begin in range(share * lanes // (parts * SHARES), end, LANES):
        merge_parts(
            out,
            sums_at,
            stats_at,
            sinks,
            row,
            head,
            begin,
            end,
            place - part,
            parts,
            0,
            0,
            stride_out,
            D,
            DP,
            GROUP,
            M,
            LANES,
            HEADS,
            PARTS,
        )
