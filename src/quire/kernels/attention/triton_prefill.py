"""Attention of sequences with many rows (chunks of prompts).

A program computes a tile of the plan: some rows of a sequence with the query heads of a KV head, over their whole
context. Tiles of keys that no row sees are not read; those that all rows see are not masked.
"""

from __future__ import annotations

from quire.kernels.attention.triton_tiles import LOWEST, attend, load_queries, store_outputs
from quire.kernels.triton_runtime import jit, tl


@jit
def prefill_kernel(
    q, out, k, v, table, tiles, sinks, row_positions, stride_q, stride_out, stride_block, stride_head,
    stride_token, stride_table, scale, cap, v_scale, WINDOW: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
    SIZE: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, TILE_WORDS: tl.constexpr,
):  # fmt: skip
    """Compute attention of a tile of query rows over all keys that they see. Grid (tiles, KV heads).

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
    GROUP               number of query heads of a KV head
    M                   lanes of a tile: GROUP times its rows
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
    if WINDOW > 0:
        middle = tl.maximum(position - WINDOW + 1, 0) // TILE * TILE
    else:
        middle = (position + 1) // TILE * TILE
        sums, top, weight = attend(
            queries, sums, top, weight, positions, k, v, table, 0, middle, stride_block, stride_token, scale, cap,
            False, 0, CAPPED, EXACT, SIZE, TILE, D, DP,
        )  # fmt: skip
    sums, top, weight = attend(
        queries, sums, top, weight, positions, k, v, table, middle, last, stride_block, stride_token, scale, cap,
        True, WINDOW, CAPPED, EXACT, SIZE, TILE, D, DP,
    )  # fmt: skip
    if v_scale is not None:
        sums *= v_scale
    store_outputs(out, sums, top, weight, sinks, rows, heads, live, stride_out, D, DP)
