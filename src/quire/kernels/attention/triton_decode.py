"""Attention of sequences with few rows (decodes).

A program reads an item of the plan: a part of a sequence's context, for a KV head and all its query heads. The program
of a sequence that finishes last adds up the parts, always in the same order. So one launch is enough, and the result
does not depend on timing.
"""

from __future__ import annotations

from quire.kernels.attention.triton_tiles import LOWEST, attend, load_queries, store_outputs, store_part
from quire.kernels.triton_runtime import jit, tl


@jit
def decode_kernel(
    q, out, k, v, table, items, counters, sums_at, stats_at, sinks, stride_q, stride_out, stride_block, stride_head,
    stride_token, stride_table, scale, cap, v_scale, WINDOW: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
    SIZE: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, M: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, SHARED: tl.constexpr,
    ITEM_WORDS: tl.constexpr,
):  # fmt: skip
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
        queries, sums, top, tl.zeros([M], tl.float32), length - num_rows + token, k + head * stride_head,
        v + head * stride_head, table, start, end, stride_block, stride_token, scale, cap,
        True, WINDOW, CAPPED, EXACT, SIZE, TILE, D, DP,
    )  # fmt: skip
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
            _merge(
                out, sums_at, stats_at, sinks, row, head, num_rows, first, parts, prefix_first, prefix_parts,
                stride_out, D, DP, GROUP, ROWS, M, HEADS, PARTS,
            )  # fmt: skip


@jit
def _merge(
    out, sums_at, stats_at, sinks, row, head, num_rows, first, parts, prefix_first, prefix_parts, stride_out,
    D: tl.constexpr, DP: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, HEADS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Add up the parts of a sequence for a KV head, and store the result.

    row, num_rows                 first row of the sequence, and its rows
    first, parts                  its own parts: index of the first, number
    prefix_first, prefix_parts    parts of its shared prefix: index of the first, number
    head                          KV head; other arguments as in `decode_kernel`

    All rows are added side by side, parts one after the other; AT_ONCE of them are read at the same time.
    """
    AT_ONCE: tl.constexpr = 4 if M * DP <= 2048 else 1
    part, lane, dims = tl.arange(0, PARTS), tl.arange(0, M), tl.arange(0, DP)
    live, total = lane < num_rows * GROUP, parts + prefix_parts
    place = tl.where(part < parts, first + part, prefix_first + part - parts).to(tl.int64) * HEADS + head
    at, known = stats_at + 2 * (place[:, None] * ROWS + lane[None, :]), (part < total)[:, None] & live[None, :]
    tops = tl.load(at, mask=known, other=LOWEST, cache_modifier=".cg")
    weights = tl.load(at + 1, mask=known, other=0.0, cache_modifier=".cg")
    top = tl.max(tops, 0)
    weight = tl.sum(weights * tl.exp2(tops - top[None, :]), 0)
    query_head = head * GROUP + lane % GROUP
    if sinks is not None:
        sink = tl.load(sinks + query_head, mask=live, other=0.0)
        weight += tl.exp2(sink.to(tl.float32) * 1.4426950408889634 - top)
    sums = tl.zeros([M, DP], tl.float32)
    inside = live[:, None] & (dims < D)[None, :]
    for start in range(0, total, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            turn = start + step
            which = tl.where(turn < parts, first + turn, prefix_first + turn - parts).to(tl.int64) * HEADS + head
            lanes, there = which * ROWS + lane, live & (turn < total)
            share = tl.exp2(tl.load(stats_at + 2 * lanes, mask=there, other=LOWEST, cache_modifier=".cg") - top)
            part_sums = tl.load(sums_at + lanes[:, None] * D + dims[None, :], mask=inside & (turn < total), other=0.0,
                                cache_modifier=".cg")  # fmt: skip
            sums += part_sums * share[:, None]
    pointers = out + ((row + lane // GROUP).to(tl.int64) * stride_out + query_head * D)[:, None] + dims[None, :]
    tl.store(pointers, (sums / weight[:, None]).to(out.dtype.element_ty), mask=inside)
