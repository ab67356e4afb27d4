"""Attention of sequences with many rows: each program is one tile of a plan, some rows of one sequence and the query
heads of one KV head, over all that they see. Blocks that no row sees are not read, and those that all rows see are
not masked. Keys and values come from the cache or, when this step holds whole contexts, from the step's own rows.
"""

from __future__ import annotations

from quire.kernels.attention.triton_tiles import LOWEST, attend, attend_described, load_queries, store_outputs
from quire.kernels.triton_runtime import jit, tl


@jit
def prefill_kernel(
    q, out, k, v, k_tiles, v_tiles, table, tiles, sinks, stride_q, stride_out, stride_block, stride_head,
    stride_token, stride_table, scale, cap, WINDOW: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
    SIZE: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, TILE_WORDS: tl.constexpr,
):  # fmt: skip
    """Programs (tiles, KV heads). k_tiles, v_tiles: descriptors of the cache, or None; SIZE 0: k, v [T, Hkv, D]."""
    head = tl.program_id(1)
    record = tiles + tl.program_id(0) * TILE_WORDS
    row = tl.load(record)
    if row < 0:
        return
    num_rows, position = tl.load(record + 1), tl.load(record + 2)
    k += head * stride_head
    v += head * stride_head
    if SIZE == 0:
        origin = tl.load(record + 4)
        k += origin * stride_token
        v += origin * stride_token
    else:
        table += tl.load(record + 3).to(tl.int64) * stride_table
    lane = tl.arange(0, M)
    token = lane // GROUP
    rows, heads, live = row + token, head * GROUP + lane % GROUP, lane < num_rows * GROUP
    positions = position + token
    queries = load_queries(q, rows, heads, live, stride_q, D, DP)
    sums = tl.zeros([M, DP], tl.float32)
    top = tl.zeros([M], tl.float32) + LOWEST
    weight = tl.zeros([M], tl.float32)
    if WINDOW > 0:
        middle = tl.maximum(position - WINDOW + 1, 0) // TILE * TILE
    else:
        middle = (position + 1) // TILE * TILE
        if k_tiles is None:
            sums, top, weight = attend(
                queries, sums, top, weight, positions, k, v, table, 0, middle, stride_block, stride_token, scale, cap,
                False, 0, CAPPED, EXACT, SIZE, TILE, D, DP,
            )  # fmt: skip
        else:
            sums, top, weight = attend_described(
                queries, sums, top, weight, k_tiles, v_tiles, table, head, 0, middle, scale, cap,
                CAPPED, EXACT, SIZE, TILE, D,
            )  # fmt: skip
    sums, top, weight = attend(
        queries, sums, top, weight, positions, k, v, table, middle, position + num_rows, stride_block, stride_token,
        scale, cap, True, WINDOW, CAPPED, EXACT, SIZE, TILE, D, DP,
    )  # fmt: skip
    store_outputs(out, sums, top, weight, sinks, rows, heads, live, stride_out, D, DP)
