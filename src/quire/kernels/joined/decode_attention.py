"""Norm, rotation, cache write and attention of decodes in one kernel, for few sequences of one row each.

A program reads an item of the plan: a part of a sequence's context, for a KV head and all its query heads, which it
norms and rotates for itself. The item with the row's own token takes that key and value from the projection, and writes
them to the cache. The program of a sequence and KV head that ends last adds up the parts, always in the same order.

All that was written before the plan can be read before the wait for the projection: the item, cos and sin, and the
last tile of keys and values but the newest token. So what is left behind the wait is one trip to memory for the
projection, two products, and the sum of the parts. The step's first launch waits before it reads the plan and lets no
later kernel start until then.

Formulas and roundings are those of `heads.triton` and `triton_decode`. The order of a part's tiles is another one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.config.env import fewer_launches
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
from quire.kernels.triton_runtime import jit, tl

ENABLED = fewer_launches()  # read at each step: a measurement may change it between two captures
MOST_ROWS = 16
MOST_GROUP = 16  # query heads of a KV head
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


TILINGS = {dim: Tiling(64 if dim <= 128 else 32, 4) for dim in (16, 32, 64, 128, 256)}  # by head size


@dataclass(frozen=True)
class HeadInputs:
    """The arguments of `quire.kernels.heads.prepare` beside the projection and the cache."""

    norm: Tensor | None
    eps: float
    cos: Tensor
    sin: Tensor


def fits(qkv: Tensor, kv: KVView, meta: AttentionMeta) -> bool:
    """Return True if `attention` can take the projection qkv [T, Hq + 2 Hkv, D] of a step."""
    tokens, heads, dim = qkv.shape
    kv_heads = kv.k.shape[1]
    return (
        0 < tokens <= MOST_ROWS
        and meta.max_query_len == meta.decode_len == 1
        and meta.shared is None
        and meta.row_positions is None
        and dim in TILINGS
        and kv.k.dtype == qkv.dtype
        and qkv.stride()[1:] == (dim, 1)
        and 0 < heads - 2 * kv_heads <= MOST_GROUP * kv_heads
    )


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
    group, tiling = own // kv_heads, TILINGS[dim]
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
        1 << (group - 1).bit_length(),
        kv_heads,
        min(MAX_PARTS, MERGED // (dim << (group - 1).bit_length())),
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
        x = x * inverse * factor.to(tl.float32)
        y = y * inverse * other.to(tl.float32)
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
def _begin(
    queries,
    key,
    value,
    both,
    owns,
    start,
    end,
    newest,
    scale,
    cap,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the state of the softmax (sums, top, weight) after the newest token, if `owns`, and a tile of others.

    queries      [M, D];  key, value  [M, D] of the token at position `newest`, the same for all lanes
    both         result of `_load_both` for the tokens start .. end - 1
    """
    M: tl.constexpr = queries.shape[0]
    lane, side = tl.arange(0, M), tl.arange(0, 2)[None, :, None]
    own = tl.sum(queries.to(tl.float32) * key.to(tl.float32), 1)
    own, rest = rescore(own[:, None], lane, newest, scale, cap, False, WINDOW, CAPPED, 1)
    top = tl.where(owns, tl.reshape(own, [M]) * rest, LOWEST)
    weight = tl.where(owns, 1.0, 0.0) + lane * 0.0
    sums = tl.where(owns, value.to(tl.float32), 0.0)
    scores = tl.dot(queries, tl.trans(both), input_precision=EXACT)
    scores = tl.sum(tl.where(side == 0, tl.reshape(scores, [M, 2, TILE]), 0.0), 1)
    scores, rest = rescore(scores, lane * 0 + newest, start, scale, cap, True, WINDOW, CAPPED, TILE)
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
    G: tl.constexpr,
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
    GROUP, G, HEADS                 query heads of a KV head; padded to a power of two; KV heads
    AT_ONCE                         parts of a sequence that are added at a time
    """
    item, head = tl.program_id(0), tl.program_id(1)
    if PDL:
        if known == 0:  # later kernels of the step read the plan, too, before they wait
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    M: tl.constexpr = 16
    record = items + item * ITEM_WORDS
    row, length = tl.load(record), tl.load(record + 2)
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
    heads, live = head * GROUP + lane, lane < GROUP
    there = live[:, None]
    beside = (dims + D // 2) % D
    owns, newest = end == length, length - 1
    to_key = HEADS * GROUP + head
    factor, other, key_factor, key_other = None, None, None, None
    if norm is not None:
        factor = tl.load(norm + heads[:, None] * D + dims, mask=there, other=0.0)
        other = tl.load(norm + heads[:, None] * D + beside, mask=there, other=0.0)
        key_factor = tl.load(norm + to_key * D + dims, mask=owns, other=0.0)
        key_other = tl.load(norm + to_key * D + beside, mask=owns, other=0.0)
    angle = row.to(tl.int64) * D + dims
    c, s = tl.load(cos + angle).to(tl.float32), tl.load(sin + angle).to(tl.float32)
    slot = tl.load(kv_slots + row, mask=owns, other=0)
    last = start + (end - start - 1) // TILE * TILE
    past = tl.minimum(end, newest)
    k += head * stride_head
    v += head * stride_head
    both = _load_both(k, v, table, last, past, stride_block, stride_token, SIZE, TILE, D)
    if PDL:
        tl.extra.cuda.gdc_wait()
    given = qkv + row.to(tl.int64) * stride_qkv
    to_q = given + heads[:, None] * D
    x = tl.load(to_q + dims, mask=there, other=0.0).to(tl.float32)
    y = tl.load(to_q + beside, mask=there, other=0.0).to(tl.float32)
    key = tl.load(given + to_key * D + dims, mask=owns, other=0.0).to(tl.float32)
    key_beside = tl.load(given + to_key * D + beside, mask=owns, other=0.0).to(tl.float32)
    value = finite(tl.load(given + (to_key + HEADS) * D + dims, mask=owns, other=0.0))
    queries = _turned(x, y, factor, other, c, s, eps, D).to(both.dtype)
    key = _turned(key, key_beside, key_factor, key_other, c, s, eps, D).to(both.dtype)
    place = slot // SIZE * stride_block + slot % SIZE * stride_token + dims
    once = owns & (lane == 0)[:, None]
    tl.store(k + place, key, mask=once)
    tl.store(v + place, value, mask=once)
    sums, top, weight = _begin(
        queries, key, value, both, owns, last, past, newest, scale, cap, WINDOW, CAPPED, EXACT, TILE
    )
    sums, top, weight = attend(
        queries,
        sums,
        top,
        weight,
        lane * 0 + newest,
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
        store_outputs(out, sums, top, weight, sinks, row + lane * 0, heads, live, stride_out, D, D)
    else:
        at = (item.to(tl.int64) * HEADS + head) * GROUP + lane
        store_part(sums_at, stats_at, sums, top, weight, at, live, D, D)
        counter = counters + first * HEADS + head
        tl.debug_barrier()  # all of the part is written before it is counted
        if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
            tl.store(counter, 0)
            _add_parts(
                out + row.to(tl.int64) * stride_out + head * (GROUP * D),
                sums_at + (first.to(tl.int64) * HEADS + head) * (GROUP * D),
                stats_at + (first.to(tl.int64) * HEADS + head) * (GROUP * 2),
                None if sinks is None else sinks + head * GROUP,
                parts,
                D,
                GROUP,
                G,
                HEADS,
                AT_ONCE,
            )


@jit
def _add_parts(
    out,
    sums_at,
    stats_at,
    sinks,
    parts,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Add up the parts of the softmax of a row for a KV head, AT_ONCE together, which is one trip to memory.

    out, sinks          [GROUP, D] output of the row; [GROUP] or None
    sums_at, stats_at   the first part of `Plan.sums` [parts, HEADS, GROUP, D] and of `Plan.stats`, at the KV head
    parts               number of parts
    """
    member, dims = tl.arange(0, G), tl.arange(0, D)
    inside = member < GROUP
    sums = tl.zeros([G, D], tl.float32)
    top, weight = tl.zeros([G], tl.float32) + LOWEST, tl.zeros([G], tl.float32)
    for begin in range(0, parts, AT_ONCE):
        part = begin + tl.arange(0, AT_ONCE)
        known = (part < parts)[:, None] & inside[None, :]
        lane = part[:, None] * (HEADS * GROUP) + member[None, :]
        tops = tl.load(stats_at + 2 * lane, mask=known, other=LOWEST, cache_modifier=".cg")
        weights = tl.load(stats_at + 2 * lane + 1, mask=known, other=0.0, cache_modifier=".cg")
        at = sums_at + lane[:, :, None] * D + dims[None, None, :]
        part_sums = tl.load(at, mask=known[:, :, None], other=0.0, cache_modifier=".cg")
        above = tl.maximum(top, tl.max(tops, 0))
        shares, decay = tl.exp2(tops - above[None, :]), tl.exp2(top - above)
        weight = weight * decay + tl.sum(weights * shares, 0)
        sums = sums * decay[:, None] + tl.sum(part_sums * shares[:, :, None], 0)
        top = above
    if sinks is not None:
        sink = tl.load(sinks + member, mask=inside, other=0.0).to(tl.float32)
        weight += tl.exp2(sink * 1.4426950408889634 - top)
    result = (sums / weight[:, None]).to(out.dtype.element_ty)
    tl.store(out + member[:, None] * D + dims[None, :], result, mask=inside[:, None])
