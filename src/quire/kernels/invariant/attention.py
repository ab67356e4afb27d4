"""Paged attention on NVIDIA GPUs with one order of the sums of each row.

The context of a row is cut into parts of PART tokens, at multiples of PART of the position. A part has a running
softmax of its own over tiles of TILE keys; parts are added to the row's state in order. Decodes and prompts run the
same kernel with the same tile of queries, so a row has the same bits as a decode, in a chunk, or computed again:

    items of few or long decodes   a part of the context each; the program that finishes last adds up the stored parts
    items of others                all parts of a tile of rows, one after the other, in registers

Products in this file are never contracted to fused ones by the compiler (`enable_fp_fusion`); where one is wanted it is
written. Keys that a row does not see have weight 0, which changes no bit of its sums. Prefixes that decodes share are
read by each decode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, KVView, as_list
from quire.kernels.attention.triton_plan import WIDTHS, multiprocessors, unspecialized
from quire.kernels.attention.triton_tiles import (
    LOG2E,
    LOWEST,
    block_ids,
    load_queries,
    load_tile,
    rescore,
    store_outputs,
    store_part,
)
from quire.kernels.triton_runtime import INTERPRETED, jit, tl

__all__ = ["paged_attention"]

PART, TILE = 256, 64  # keys of a part of a context, and of an iteration
ROWS, STAGES = 64, 3  # rows of a tile of queries: a warpgroup's product on Hopper; iterations in flight
AT_ONCE = 2  # programs that run on a multiprocessor at the same time
LONG = 16  # parts of a context from which on it is divided even in a step of many decodes
SCRATCH = 64 << 20  # bytes for stored parts; if all do not fit, none is stored
WORDS = 12  # of an item, see `Plan.items`
ENTRIES = 32  # items that a program of the plan's kernel writes


@dataclass(frozen=True)
class Plan:
    """Work list of a step, and scratch for the parts of decodes.

    limit      sequences with at most so many rows are decodes
    items      [I, WORDS] int32; words of an item: 0 first row, 1 rows, 2 position of the first row, 3 row of the block
               tables, 4 first token to read, a multiple of PART, 5 end of the tokens, 6 number of stored parts of the
               sequence (1: none is stored), 7 index of the first of these, 8 of the item's own
    count      [1] int32: number of items
    counters   [P, Hkv] int32: number of finished parts of a sequence, at its first part; 0 between launches
    sums       [P, Hkv, lanes, D] float32: weighted sums of values of each stored part
    stats      [P, Hkv, lanes, 2] float32: maximum score (base 2) and sum of weights of each stored part
    """

    limit: int
    items: Tensor
    count: Tensor
    counters: Tensor
    sums: Tensor
    stats: Tensor


def paged_attention(
    q: Tensor,
    kv: KVView,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of query rows over the paged cache. See `quire.kernels.attention`."""
    (tokens, heads, dim), k = q.shape, kv.k
    kv_heads, group = k.shape[1], heads // k.shape[1]
    assert q.stride()[1:] == (dim, 1) and k.stride(-1) == 1 and k.stride() == kv.v.stride()
    assert meta.row_positions is None and group <= ROWS, "rows are the last tokens of their sequence"
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    plan = plan_step(meta, (kv_heads, group, dim), kv.block_size, window or 0, tokens)
    capped = soft_cap is not None
    grid = min(len(plan.items), -(-AT_ONCE * multiprocessors() // kv_heads)), kv_heads
    _attend_kernel[grid](
        q,
        out,
        k,
        kv.v,
        meta.block_tables,
        plan.items,
        plan.count,
        plan.counters,
        plan.sums,
        plan.stats,
        sinks,
        q.stride(0),
        out.stride(0),
        *k.stride()[:3],
        meta.block_tables.stride(0),
        scale / soft_cap if soft_cap is not None else scale * LOG2E,
        soft_cap * LOG2E if soft_cap is not None else 0.0,
        WINDOW=window or 0,
        CAPPED=capped,
        EXACT="ieee" if q.dtype == torch.float32 else "tf32",
        SIZE=kv.block_size,
        TILE=TILE,
        PART=PART,
        D=dim,
        DP=max(16, _power(dim)),
        GROUP=group,
        LANES=plan.sums.shape[2],
        M=ROWS,
        HEADS=kv_heads,
        WORDS=WORDS,
        num_warps=4 if dim <= 128 else 8,
        num_stages=STAGES if q.element_size() == 2 and dim <= 128 else 1,
        **unfused(),
    )
    return out


def unfused() -> dict[str, bool]:
    """Return the launch options of kernels whose products and sums the compiler must not contract."""
    return {} if INTERPRETED else {"enable_fp_fusion": False}  # the interpreter contracts nothing


def plan_step(meta: AttentionMeta, heads: tuple[int, int, int], size: int, window: int, num_rows: int) -> Plan:
    """Return the plan of a step of `num_rows` rows; `meta.plans` keeps it for layers with the same heads and window.

    heads   number of KV heads, query heads of each, size of a head
    size    tokens of a block
    """
    key = heads, size, window
    plan = meta.plans.get(key)
    if not isinstance(plan, Plan):
        plan = meta.plans[key] = _make(meta, heads, size, window, num_rows)
    return plan


def _make(meta: AttentionMeta, heads: tuple[int, int, int], size: int, window: int, num_rows: int) -> Plan:
    assert isinstance(meta.query_start, Tensor) and isinstance(meta.seq_lens, Tensor)
    (kv_heads, group, dim), device, num_seqs = heads, meta.seq_lens.device, len(meta.seq_lens)
    limit, each = min(max(1, meta.decode_len), ROWS // group), ROWS // group
    longest = meta.max_query_len
    if longest is None:
        starts = as_list(meta.query_start)
        longest = max(b - a for a, b in zip(starts, starts[1:], strict=False))
    context = meta.block_tables.shape[1] * size
    if window:
        context = min(context, abs(window) + limit + PART)  # that a decode reads
    lanes, wide = _power(limit * group), num_seqs * kv_heads > 4 * AT_ONCE * multiprocessors()
    stored = min(num_seqs * -(-context // PART), SCRATCH // (4 * kv_heads * lanes * (dim + 2)))
    most = num_seqs + stored + (num_rows // each if longest > limit else 0)
    lists = torch.empty(most * WORDS + 4, dtype=torch.int32, device=device)
    plan = Plan(
        limit=limit,
        items=lists[4:].view(most, WORDS),
        count=lists[:1],
        counters=torch.zeros(stored * kv_heads, dtype=torch.int32, device=device),
        sums=torch.empty(stored, kv_heads, lanes, dim, dtype=torch.float32, device=device),
        stats=torch.empty(stored, kv_heads, lanes, 2, dtype=torch.float32, device=device),
    )
    _plan_kernel[(-(-most // ENTRIES),)](
        meta.query_start,
        meta.seq_lens,
        meta.table_rows,
        plan.items,
        plan.count,
        num_seqs,
        most,
        limit,
        each,
        stored,
        LONG if wide else 1,
        WINDOW=window,
        PART=PART,
        WIDTH=next(width for width in WIDTHS if width >= num_seqs),
        ENTRIES=ENTRIES,
        WORDS=WORDS,
        num_warps=4,
    )
    return plan


def _power(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


@jit
def _first_seen(position, WINDOW: tl.constexpr):
    """Return the first token that a row at `position` sees."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    if WINDOW < 0:
        first = position // -WINDOW * -WINDOW
    return first


# Integers of a step: a value of 1 or a multiple of 16 must not make Triton compile the kernel again.
@unspecialized("num_seqs", "most", "limit", "each", "stored", "least")
def _plan_kernel(
    query_start,
    seq_lens,
    table_rows,
    items,
    count,
    num_seqs,
    most,
    limit,
    each,
    stored,
    least,
    WINDOW: tl.constexpr,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
    ENTRIES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Write ENTRIES items. Grid (ceil(most / ENTRIES),). Items of a sequence follow each other.

    query_start, seq_lens, table_rows   as in `AttentionMeta`
    items, count       outputs, see `Plan`;  most  upper bound of the items
    limit, each        most rows of a decode; rows of a tile of a prompt
    stored, least      parts for which there is memory; a decode with more parts than `least` is divided
    WIDTH              upper bound of the sequences, a power of two
    """
    lane = tl.arange(0, WIDTH)
    inside = lane < num_seqs
    row = tl.load(query_start + lane, mask=inside, other=0)
    rows = tl.where(inside, tl.load(query_start + lane + 1, mask=inside, other=0) - row, 0)
    length = tl.load(seq_lens + lane, mask=inside, other=0)
    parts = (length + PART - 1) // PART - _first_seen(length - rows, WINDOW) // PART
    divided = (rows > 0) & (rows <= limit) & (parts > least)
    if tl.sum(tl.where(divided, parts, 0), 0) > stored:
        divided = divided & (lane < 0)
    held = tl.where(divided, parts, 0)
    own = tl.where(divided, parts, (rows + each - 1) // each)
    after, slots, total = tl.cumsum(own, 0), tl.cumsum(held, 0) - held, tl.sum(own, 0)
    item = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    mine = (item[:, None] < after[None, :]) & (item[:, None] >= (after - own)[None, :])
    seq = tl.sum(tl.where(mine, lane[None, :], 0), 1)
    place = item - tl.sum(tl.where(mine, (after - own)[None, :], 0), 1)
    number = tl.sum(tl.where(mine, held[None, :], 0), 1)  # 0: not divided
    slot = tl.sum(tl.where(mine, slots[None, :], 0), 1)
    there = (item < total) & (item < most)
    row = tl.load(query_start + seq, mask=there, other=0)
    rows = tl.load(query_start + seq + 1, mask=there, other=0) - row
    length = tl.load(seq_lens + seq, mask=there, other=0)
    skipped = tl.where(number > 0, 0, place * each)  # rows of the sequence before the item's
    position = length - rows + skipped
    height = tl.where(number > 0, rows, tl.minimum(each, rows - skipped))
    part = _first_seen(position, WINDOW) // PART + tl.where(number > 0, place, 0)
    end = position + height
    end = tl.where(number > 0, tl.minimum((part + 1) * PART, end), end)
    table_row = seq
    if table_rows is not None:
        table_row = tl.load(table_rows + seq, mask=there, other=0)
    record = items + item * WORDS
    tl.store(record, row + skipped, mask=there)
    tl.store(record + 1, height, mask=there)
    tl.store(record + 2, position, mask=there)
    tl.store(record + 3, table_row, mask=there)
    tl.store(record + 4, part * PART, mask=there)
    tl.store(record + 5, end, mask=there)
    tl.store(record + 6, tl.maximum(number, 1), mask=there)
    tl.store(record + 7, slot, mask=there)
    tl.store(record + 8, slot + place, mask=there)
    if tl.program_id(0) == 0:
        tl.store(count, total)


@jit
def _joined(sums, top, weight, part_sums, part_top, part_weight):
    """Add a part of the softmax to the state before it. Returns sums, top, weight; see `triton_tiles.accumulate`."""
    above = tl.maximum(top, part_top)
    old, new = tl.exp2(top - above), tl.exp2(part_top - above)
    sums = tl.fma(part_sums, tl.broadcast_to(new[:, None], sums.shape), sums * old[:, None])
    return sums, above, tl.fma(part_weight, new, weight * old)


@jit(do_not_specialize=["stride_q"])
def _attend_kernel(
    q,
    out,
    k,
    v,
    table,
    items,
    count,
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
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    M: tl.constexpr,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Compute the items of the plan, each for a KV head. Grid (programs, KV heads); programs take items in turn.

    q, out              [T, H, D] queries and output
    k, v                cache [blocks, HEADS, SIZE, D]
    table               block tables [slots or sequences, blocks] int32
    items, count, counters, sums_at, stats_at   see `Plan`
    sinks               [H], or None
    stride_q, stride_out, stride_table   elements from row to row of q, of out, of table
    stride_block, stride_head, stride_token   elements from block to block, head to head, token to token of the cache
    scale, cap, WINDOW, CAPPED, EXACT, SIZE, TILE, D, DP   see `triton_tiles`
    HEADS, GROUP        number of KV heads; number of query heads of a KV head
    M, LANES            lanes of a tile of queries; lanes of a stored part
    """
    head = tl.program_id(1)
    k += head * stride_head
    v += head * stride_head
    lane = tl.arange(0, M)
    token = lane // GROUP
    heads = head * GROUP + lane % GROUP
    for item in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        record = items + item * WORDS
        row, num_rows, position = tl.load(record), tl.load(record + 1), tl.load(record + 2)
        first, end = tl.load(record + 4), tl.load(record + 5)
        parts, begin, slot = tl.load(record + 6), tl.load(record + 7), tl.load(record + 8)
        own = table + tl.load(record + 3).to(tl.int64) * stride_table
        rows, live = row + token, lane < num_rows * GROUP
        positions = position + token
        queries = load_queries(q, rows, heads, live, stride_q, D, DP)
        seen = _first_seen(position, WINDOW) // TILE * TILE  # no row sees the tiles before
        sums, top = tl.zeros([M, DP], tl.float32), tl.zeros([M], tl.float32) + LOWEST
        weight = tl.zeros([M], tl.float32)
        for start in range(first, end, PART):
            stop = tl.minimum(start + PART, end)
            part_sums, part_top = tl.zeros([M, DP], tl.float32), tl.zeros([M], tl.float32) + LOWEST
            part_weight = tl.zeros([M], tl.float32)
            for at in tl.range(tl.maximum(start, seen), stop, TILE):
                ids = block_ids(own, at, stop, SIZE, TILE)
                keys = load_tile(k, ids, at, stop, stride_block, stride_token, False, SIZE, TILE, D, DP)
                values = load_tile(v, ids, at, stop, stride_block, stride_token, True, SIZE, TILE, D, DP)
                scores = tl.dot(queries, tl.trans(keys), input_precision=EXACT)
                scores, rest = rescore(scores, positions, at, scale, cap, True, WINDOW, CAPPED, TILE)
                above = tl.maximum(part_top, tl.max(scores, 1) * rest)
                weights = tl.exp2(tl.fma(scores, tl.full([M, TILE], rest, tl.float32), -above[:, None]))
                decay = tl.exp2(part_top - above)
                part_weight = tl.fma(part_weight, decay, tl.sum(weights, 1))
                part_sums = tl.dot(weights.to(values.dtype), values, part_sums * decay[:, None], input_precision=EXACT)
                part_top = above
            sums, top, weight = _joined(sums, top, weight, part_sums, part_top, part_weight)
        if parts == 1:
            store_outputs(out, sums, top, weight, sinks, rows, heads, live, stride_out, D, DP)
        else:
            mine = (slot.to(tl.int64) * HEADS + head) * LANES + lane
            store_part(sums_at, stats_at, sums, top, weight, mine, live, D, DP)
            counter = counters + begin * HEADS + head
            tl.debug_barrier()  # all of the part is written before it is counted
            if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
                tl.store(counter, 0)
                lanes = tl.arange(0, LANES)
                some, dims = lanes < num_rows * GROUP, tl.arange(0, DP)
                inside = some[:, None] & (dims < D)[None, :]
                all_sums, all_top = tl.zeros([LANES, DP], tl.float32), tl.zeros([LANES], tl.float32) + LOWEST
                all_weight = tl.zeros([LANES], tl.float32)
                for part in range(0, parts):
                    place = ((begin + part).to(tl.int64) * HEADS + head) * LANES + lanes
                    found = tl.load(
                        sums_at + place[:, None] * D + dims[None, :], mask=inside, other=0.0, cache_modifier=".cg"
                    )
                    high = tl.load(stats_at + 2 * place, mask=some, other=LOWEST, cache_modifier=".cg")
                    mass = tl.load(stats_at + 2 * place + 1, mask=some, other=0.0, cache_modifier=".cg")
                    all_sums, all_top, all_weight = _joined(all_sums, all_top, all_weight, found, high, mass)
                ours = head * GROUP + lanes % GROUP
                store_outputs(
                    out, all_sums, all_top, all_weight, sinks, row + lanes // GROUP, ours, some, stride_out, D, DP
                )
