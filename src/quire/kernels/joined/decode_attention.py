"""Norm, rotation, cache write and attention of decodes in one kernel, for few rows.

A program reads an item of the plan: a part of a sequence's context, for a KV head and all its query heads, which it
norms and rotates for itself. The item with a token of the step takes that key and value from the projection, and writes
them to the cache. The program of a sequence and KV head that ends last adds up the parts, always in the same order.

All that was written before the plan can be read before the wait for the projection: the item, cos and sin, and the
last tile of keys and values before the step's tokens. So what is left behind the wait is one trip to memory for the
projection, two products, and the sum of the parts. The step's first launch waits before it reads the plan and lets no
later kernel start until then.

Formulas and roundings are those of `heads.triton` and `triton_decode`. The order of a part's tiles is another one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.attention import AttentionMeta, KVView
from quire.kernels.attention.triton_plan import ITEM_WORDS, MAX_PARTS, Shape, plan_step, unspecialized
from quire.kernels.attention.triton_tiles import (
    LOG2E,
    LOWEST,
    attend,
    finite,
    rescore,
    store_outputs,
    store_part,
)
from quire.kernels.joined import HEAD_DIMS
from quire.kernels.joined.inputs import HeadInputs, few_decodes
from quire.kernels.linear.gemv import bucket
from quire.kernels.triton_runtime import jit, tl

MERGED = 8192  # numbers of the parts that a program adds at a time


@dataclass(frozen=True)
class Tiling:
    """The tiling of the kernel.

    keys       keys of an iteration, for elements of two bytes
    programs   programs that run on a multiprocessor at the same time
    """

    keys: int
    warps: int
    programs: int = 2


TILINGS = {dim: Tiling(64 if dim <= 128 else 32, 4) for dim in HEAD_DIMS}  # by head size


def fits(qkv: Tensor, kv: KVView, meta: AttentionMeta) -> bool:
    """Return True if `attention` can take the projection qkv [T, Hq + 2 Hkv, D] of a step."""
    return few_decodes(qkv, kv, meta) and qkv.shape[2] in TILINGS


def attention(
    qkv: Tensor,
    heads: HeadInputs,
    kv: KVView,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write the step's keys and values to `kv`, and return the attention [T, Hq, D] of its queries.

    qkv [T, Hq + 2 Hkv, D] is the projection; for the other arguments see `quire.kernels.attention`.
    """
    tokens, _, dim = qkv.shape
    k, kv_heads = kv.k, kv.k.shape[1]
    own = qkv.shape[1] - 2 * kv_heads
    group, tiling, rows = own // kv_heads, TILINGS[dim], meta.max_query_len or 1
    lanes = bucket(group * rows)
    keys = tiling.keys * 2 // qkv.element_size()
    shape = Shape(own, group, dim, kv.block_size, window or 0, keys, group, tiling.programs)
    known = shape in meta.plans.get(shape.block_size, {})  # type: ignore[operator]
    plan = plan_step(meta, shape, tokens)
    out = torch.empty((tokens, own, dim), dtype=qkv.dtype, device=qkv.device)
    in_pdl = pdl.in_use()
    _headed_kernel[(len(plan.items), kv_heads)](
        qkv,
        heads.norm,
        heads.cos,
        heads.sin,
        meta.kv_slots,
        out,
        k,
        kv.v,
        meta.block_tables,
        plan.items,
        plan.counters,
        plan.sums,
        plan.stats,
        sinks,
        int(known),
        qkv.stride(0),
        out.stride(0),
        *k.stride()[:3],
        meta.block_tables.stride(0),
        heads.eps,
        *((scale * LOG2E, 0.0) if soft_cap is None else (scale / soft_cap, soft_cap * LOG2E)),
        window or 0,
        soft_cap is not None,
        "ieee" if qkv.dtype == torch.float32 else "tf32",
        kv.block_size,
        keys,
        dim,
        group,
        rows,
        max(16, lanes),
        lanes,
        kv_heads,
        max(1, min(MAX_PARTS, MERGED // (dim * lanes))),
        ITEM_WORDS,
        in_pdl,
        num_warps=tiling.warps,
        num_stages=2,
        **pdl.options(in_pdl),
    )
    return out


@jit
def _turned(x, y, factor, other, c, s, eps, D: tl.constexpr):
    """Norm (factor None: not) and rotate heads [N, D] in float32.

    x, factor   numbers of the heads, and weights of the norm;  y, other  the same from half a head further on
    c, s        cos and signed sin, [N, D] too
    """
    if factor is not None:
        inverse = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / D + eps)
        x = x * inverse * factor
        y = y * inverse * other
    return x * c + y * s


@jit
def _load_both(
    k, v, table, start, end, stride_block, stride_token, SIZE: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr
):
    """Load the keys, then the values of TILE tokens from `start` on, as one tile [2 TILE, D]: zeros from `end` on.

    Two loads would wait for each other: Triton writes a tile to shared memory as soon as it is loaded.
    """
    lane, dims = tl.arange(0, 2 * TILE), tl.arange(0, D)
    tokens = start + lane % TILE
    if SIZE % TILE == 0:
        ids = tl.load(table + start // SIZE, mask=start < end, other=0)
    else:
        ids = tl.load(table + tokens // SIZE, mask=tokens < end, other=0)
    places = ids.to(tl.int64) * stride_block + tokens % SIZE * stride_token
    apart = (v.to(tl.int64) - k.to(tl.int64)) // (k.dtype.element_ty.primitive_bitwidth // 8)
    places += tl.where(lane < TILE, 0, tl.multiple_of(apart, 16))
    return tl.load(k + places[:, None] + dims[None, :], mask=(tokens < end)[:, None], other=0.0)


@jit
def _pair(at, dims, beside, there):
    """Load the numbers `dims` of heads, and those half a head further on, in float32."""
    one, other = tl.load(at + dims, mask=there, other=0.0), tl.load(at + beside, mask=there, other=0.0)
    return one.to(tl.float32), other.to(tl.float32)


@jit
def _write(k, v, place, key, value, there):
    """Write a key and a value to the cache."""
    tl.store(k + place, key, mask=there)
    tl.store(v + place, value, mask=there)


@jit
def _fetch(qkv, cos, sin, kv_slots, row, key, there, dims, beside, HEADS: tl.constexpr, D: tl.constexpr):
    """Load a row's key, the same from half a head further on, its value, cos and sin, for all lanes [M, D]; its slot.

    qkv   the row of the projection;  key  number of the head of keys among its heads, before HEADS of values
    """
    angle = row.to(tl.int64) * D + dims
    own, other = _pair(qkv + key * D, dims, beside, there)
    value = finite(tl.load(qkv + (key + HEADS) * D + dims, mask=there, other=0.0))
    slot = tl.load(kv_slots + row, mask=there, other=0)
    c, s = tl.load(cos + angle, mask=there, other=0.0), tl.load(sin + angle, mask=there, other=0.0)
    return own, other, value, c.to(tl.float32), s.to(tl.float32), slot


@jit
def _add_token(
    queries, key, value, state, there, position, positions, scale, cap, WINDOW: tl.constexpr, CAPPED: tl.constexpr
):
    """Add the step's token at `position` to the softmax.

    key, value   [M, D], the same for all lanes;  there  False: no token is added
    state        (sums, top, weight), returned anew;  positions  [M] of the rows
    """
    sums, top, weight = state
    scores = tl.sum(queries.to(tl.float32) * key.to(tl.float32), 1)[:, None]
    scores, rest = rescore(scores, positions, position, scale, cap, True, WINDOW, CAPPED, 1)
    scores = tl.where(there, tl.reshape(scores, [queries.shape[0]]) * rest, float("-inf"))
    above = tl.maximum(top, scores)
    share, decay = tl.exp2(scores - above), tl.exp2(top - above)
    return sums * decay[:, None] + value.to(tl.float32) * share[:, None], above, weight * decay + share


@jit
def _add_tile(
    queries,
    both,
    state,
    positions,
    start,
    end,
    scale,
    cap,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add the tokens start .. end - 1 to the softmax, whose keys and values `_load_both` has loaded.

    state   (sums, top, weight), returned anew
    """
    M: tl.constexpr = queries.shape[0]
    side = tl.arange(0, 2)[None, :, None]
    sums, top, weight = state
    scores = tl.dot(queries, tl.trans(both), input_precision=EXACT)
    scores = tl.sum(tl.where(side == 0, tl.reshape(scores, [M, 2, TILE]), 0.0), 1)
    scores, rest = rescore(scores, positions, start, scale, cap, True, WINDOW, CAPPED, TILE)
    scores = tl.where((start + tl.arange(0, TILE) < end)[None, :], scores * rest, float("-inf"))
    above = tl.maximum(top, tl.max(scores, 1))
    weights, decay = tl.exp2(scores - above[:, None]), tl.exp2(top - above)
    spread = tl.reshape(tl.where(side == 1, weights[:, None, :], 0.0), [M, 2 * TILE])
    sums = tl.dot(spread.to(both.dtype), both, sums * decay[:, None], input_precision=EXACT)
    return sums, above, weight * decay + tl.sum(weights, 1)


@unspecialized("known")
def _headed_kernel(
    qkv,
    norm,
    cos,
    sin,
    kv_slots,
    out,
    k,
    v,
    table,
    items,
    counters,
    sums_at,
    stats_at,
    sinks,
    known,
    stride_qkv,
    stride_out,
    stride_block,
    stride_head,
    stride_token,
    stride_table,
    eps,
    scale,
    cap,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ITEM_WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute an item of decode attention, from the projection on. Grid (items, KV heads).

    qkv, norm, cos, sin, kv_slots   as in `heads.triton._heads_kernel`, with HEADS * GROUP query heads
    out, k, v                       [T, H, D] output; cache [blocks, HEADS, SIZE, D]
    table .. sinks                  as in `triton_decode.decode_kernel`
    known                           0: the plan was made just before this launch
    stride_..                       elements from token to token of qkv and of out; others as in `decode_kernel`
    eps                             of the norm
    scale, cap, WINDOW, CAPPED, EXACT, SIZE, TILE, D   see `triton_tiles`
    GROUP, ROWS, HEADS              query heads of a KV head; most rows of a sequence; KV heads
    M, LANES                        GROUP * ROWS padded to a power of two, M at least 16
    AT_ONCE                         parts of a sequence that are added at a time
    """
    item, head = tl.program_id(0), tl.program_id(1)
    if PDL:
        if known == 0:  # later kernels of the step read the plan, too, before they wait
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    record = items + item * ITEM_WORDS
    row, num_rows, length = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    start, end = tl.load(record + 3), tl.load(record + 4)
    parts, first = tl.load(record + 5), tl.load(record + 6)
    table += tl.load(record + 7).to(tl.int64) * stride_table
    if row < 0:
        if PDL:
            if item == 0:  # a kernel must not end before the one before it: some program waits
                tl.extra.cuda.gdc_wait()
        return
    lane = tl.arange(0, M)
    dims = tl.broadcast_to(tl.arange(0, D)[None, :], [M, D])  # what all lanes need is loaded for each: all lie alike
    rows, heads, live = row + lane // GROUP, head * GROUP + lane % GROUP, lane < num_rows * GROUP
    there, beside = live[:, None], (dims + D // 2) % D
    before = length - num_rows  # tokens in the cache
    positions, past, to_key = before + lane // GROUP, tl.minimum(end, before), HEADS * GROUP + head
    factor, other, key_factor, key_other = None, None, None, None
    if norm is not None:
        factor, other = _pair(norm + heads[:, None] * D, dims, beside, there)
        key_factor, key_other = _pair(norm + to_key * D, dims, beside, end > before)
    angle = rows[:, None].to(tl.int64) * D + dims
    c, s = tl.load(cos + angle, mask=there).to(tl.float32), tl.load(sin + angle, mask=there).to(tl.float32)
    last = start + tl.maximum(past - start - 1, 0) // TILE * TILE
    k += head * stride_head
    v += head * stride_head
    both = _load_both(k, v, table, last, past, stride_block, stride_token, SIZE, TILE, D)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x, y = _pair(qkv + rows[:, None].to(tl.int64) * stride_qkv + heads[:, None] * D, dims, beside, there)
    fresh = ()
    for j in tl.static_range(ROWS):
        owns = (j < num_rows) & (start <= before + j) & (before + j < end)
        to_row = qkv + (row + j).to(tl.int64) * stride_qkv
        fresh = fresh + (_fetch(to_row, cos, sin, kv_slots, row + j, to_key, owns, dims, beside, HEADS, D),)
    queries = _turned(x, y, factor, other, c, s, eps, D).to(both.dtype)
    state = tl.zeros([M, D], tl.float32), tl.zeros([M], tl.float32) + LOWEST, tl.zeros([M], tl.float32)
    for j in tl.static_range(ROWS):
        owns = (j < num_rows) & (start <= before + j) & (before + j < end)
        key, key_beside, value, key_c, key_s, slot = fresh[j]
        key = _turned(key, key_beside, key_factor, key_other, key_c, key_s, eps, D).to(both.dtype)
        place = slot // SIZE * stride_block + slot % SIZE * stride_token + dims
        _write(k, v, place, key, value, owns & (lane == 0)[:, None])
        state = _add_token(queries, key, value, state, owns, before + j, positions, scale, cap, WINDOW, CAPPED)
    sums, top, weight = _add_tile(queries, both, state, positions, last, past, scale, cap, WINDOW, CAPPED, EXACT, TILE)
    sums, top, weight = attend(
        queries,
        sums,
        top,
        weight,
        positions,
        k,
        v,
        table,
        start,
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
        D,
    )
    if parts == 1:
        store_outputs(out, sums, top, weight, sinks, rows, heads, live, stride_out, D, D)
    else:
        at = (item.to(tl.int64) * HEADS + head) * (ROWS * GROUP) + lane
        store_part(sums_at, stats_at, sums, top, weight, at, live, D, D)
        counter = counters + first * HEADS + head
        tl.debug_barrier()  # all of the part is written before it is counted
        if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
            tl.store(counter, 0)
            begin = (first.to(tl.int64) * HEADS + head) * (ROWS * GROUP)
            _add_parts(
                out + row.to(tl.int64) * stride_out,
                sums_at + begin * D,
                stats_at + begin * 2,
                sinks,
                (head * GROUP, num_rows * GROUP),
                parts,
                stride_out,
                D,
                GROUP,
                LANES,
                HEADS * ROWS * GROUP,
                AT_ONCE,
            )


@jit
def _add_parts(
    out,
    sums_at,
    stats_at,
    sinks,
    heads_of,
    parts,
    stride,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    APART: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Add up the parts of the softmax of a sequence for a KV head, AT_ONCE together, which is one trip to memory.

    out, stride         output of the sequence's first row; elements from row to row
    sums_at, stats_at   the first part of `Plan.sums` and of `Plan.stats`, at the KV head; APART lanes from part to part
    heads_of            first query head, and number of lanes;  sinks  as in `_headed_kernel`
    """
    lane, dims = tl.arange(0, LANES), tl.arange(0, D)
    head, inside = heads_of[0] + lane % GROUP, lane < heads_of[1]
    sums = tl.zeros([LANES, D], tl.float32)
    top, weight = tl.zeros([LANES], tl.float32) + LOWEST, tl.zeros([LANES], tl.float32)
    for begin in range(0, parts, AT_ONCE):
        part = begin + tl.arange(0, AT_ONCE)
        known = (part < parts)[:, None] & inside[None, :]
        place = part[:, None] * APART + lane[None, :]
        tops = tl.load(stats_at + 2 * place, mask=known, other=LOWEST, cache_modifier=".cg")
        weights = tl.load(stats_at + 2 * place + 1, mask=known, other=0.0, cache_modifier=".cg")
        at = sums_at + place[:, :, None] * D + dims[None, None, :]
        part_sums = tl.load(at, mask=known[:, :, None], other=0.0, cache_modifier=".cg")
        above = tl.maximum(top, tl.max(tops, 0))
        shares, decay = tl.exp2(tops - above[None, :]), tl.exp2(top - above)
        weight = weight * decay + tl.sum(weights * shares, 0)
        sums = sums * decay[:, None] + tl.sum(part_sums * shares[:, :, None], 0)
        top = above
    if sinks is not None:
        sink = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32)
        weight += tl.exp2(sink * 1.4426950408889634 - top)
    result = (sums / weight[:, None]).to(out.dtype.element_ty)
    to = (lane // GROUP).to(tl.int64) * stride + head * D
    tl.store(out + to[:, None] + dims[None, :], result, mask=inside[:, None])
