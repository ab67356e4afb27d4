"""Attention of sequences with few rows (decodes).

A program reads an item of the plan: a part of a sequence's context, for a KV head and all its query heads. The program
of a sequence that finishes last adds up the parts, always in the same order. So one launch is enough, and the result
does not depend on timing.
"""

from __future__ import annotations

from quire.kernels.attention.triton_tiles import LOWEST, attend, load_queries, merge_parts, store_outputs, store_part
from quire.kernels.triton_runtime import jit, tl


@jit
def decode_kernel(
    q,
    out,
    k,
    v,
    table,
    items,
    counters,
    sums_at,
    stats_at,
    sinks,
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
    ROWS: tl.constexpr,
    M: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    SHARED: tl.constexpr,
    ITEM_WORDS: tl.constexpr,
):
    """Compute decode attention of an item: a part of the context of a sequence. Grid (items, KV heads).

    The last program of a sequence to finish adds up the parts of the sequence.

    q, out              [T, H, D] queries and output
    k, v                cache [blocks, HEADS, SIZE, D]
    table               block tables [slots or sequences, blocks] int32
    items, counters, sums_at, stats_at   `Plan.items`, `Plan.counters`, `Plan.sums`, `Plan.stats`
    sinks               [H], or None
    stride_q, stride_out, stride_table   elements from row to row of q, of out, of table
    stride_block, stride_head, stride_token   elements from block to block, head to head, token to token of the cache
    scale, cap, WINDOW, CAPPED, EXACT, SIZE, TILE, D, DP   see `triton_tiles`
    v_scale             scale of the codes of an 8-bit cache, else None
    HEADS, GROUP        number of KV heads; number of query heads of a KV head
    ROWS                GROUP times the largest number of rows of a sequence
    M                   ROWS padded to a power of two, at least 16
    PARTS               upper bound of the parts of a sequence, those of a shared prefix included
    SHARED              True: the step has shared prefixes, whose parts `prefix_kernel` has written
    ITEM_WORDS          words of an item
    """
    item, head = tl.program_id(0), tl.program_id(1)
    record = items + item * ITEM_WORDS
    row, num_rows, length = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    start, end = tl.load(record + 3), tl.load(record + 4)
    parts, first = tl.load(record + 5), tl.load(record + 6)
    table += tl.load(record + 7).to(tl.int64) * stride_table
    prefix_parts, prefix_first = 0, 0
    if SHARED:
        prefix_parts, prefix_first = tl.load(record + 8), tl.load(record + 9)
    if row < 0:  # after the loads, which cost one trip to memory together
        return
    lane = tl.arange(0, M)
    token = lane // GROUP
    rows, heads, live = row + token, head * GROUP + lane % GROUP, lane < num_rows * GROUP
    queries = load_queries(q, rows, heads, live, stride_q, D, DP)
    sums = tl.zeros([M, DP], tl.float32)
    top = tl.zeros([M], tl.float32) + LOWEST
    sums, top, weight = attend(
        queries,
        sums,
        top,
        tl.zeros([M], tl.float32),
        length - num_rows + token,
        k + head * stride_head,
        v + head * stride_head,
        table,
        start,
        end,
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
    if parts + prefix_parts == 1:
        store_outputs(out, sums, top, weight, sinks, rows, heads, live, stride_out, D, DP)
    else:
        at = (item.to(tl.int64) * HEADS + head) * ROWS + lane
        store_part(sums_at, stats_at, sums, top, weight, at, live, D, DP)
        counter = counters + first * HEADS + head
        tl.debug_barrier()  # all of the part is written before it is counted
        if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
            tl.store(counter, 0)
            merge_parts(
                out,
                sums_at,
                stats_at,
                sinks,
                row,
                head,
                0,
                num_rows * GROUP,
                first,
                parts,
                prefix_first,
                prefix_parts,
                stride_out,
                D,
                DP,
                GROUP,
                ROWS,
                M,
                HEADS,
                PARTS,
            )
