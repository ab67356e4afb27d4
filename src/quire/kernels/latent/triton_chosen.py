"""Latent attention to chosen tokens: each row has a list of positions, and all heads read the latents there.

A program takes up to 64 heads of a row over a part of its list. It gathers a tile of latents once, and uses it twice,
as key and as value. `join_kernel` adds up the parts of a row, always in the same order.

Floor: 4 H (L + R / 2) operations a chosen token; its bytes are read once for each group of heads.
"""

from __future__ import annotations

from quire.kernels.attention.triton_tiles import LOWEST, accumulate, load_queries, store_outputs, store_part
from quire.kernels.latent.triton_rows import load_tokens
from quire.kernels.triton_runtime import jit, tl


@jit(do_not_specialize_on_alignment=["places"])
def slots_kernel(
    positions, places, table, slots, stride_table, top_k, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Write the slot in the cache, block * SIZE + offset, of each chosen token. Grid (rows, ceil(top_k / BLOCK)).

    positions      [rows, top_k] int32, ascending, -1 behind them, where slots [rows, top_k] int32 gets 0
    places         [rows, 2] position of each row, and its row of `table`; stride_table  elements from row to row
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, entry = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(positions + row * top_k + entry, mask=entry < top_k, other=-1)
    own = table + tl.maximum(tl.load(places + 2 * row + 1), 0).to(tl.int64) * stride_table
    block = tl.load(own + token // SIZE, mask=token >= 0, other=0)
    tl.store(slots + row * top_k + entry, tl.where(token >= 0, block * SIZE + token % SIZE, 0), mask=entry < top_k)


@jit(do_not_specialize_on_alignment=["places"])
def chosen_kernel(
    q_latent,
    q_rope,
    out,
    latent,
    rope,
    scales,
    places,
    slots,
    sums_at,
    stats_at,
    stride_latent,
    stride_rope,
    stride_rope_head,
    latent_block,
    rope_block,
    scale,
    v_scale,
    top_k,
    span,
    EXACT: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    LATENT_TOKEN: tl.constexpr,
    ROPE_TOKEN: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute attention of a row to part of its tokens, for GROUP heads. Grid (rows * HEADS, PARTS).

    slots               [rows, top_k] int32 of `slots_kernel`;  span  entries of a part
    places              [rows, 2] position of each row, and another number; a position of -1: the row is padding
    sums_at, stats_at   [rows * HEADS, PARTS, M] sums [LP] and (maximum, weight), outputs if PARTS > 1
    HEADS, GROUP, M     groups of heads; heads of a group, also padded. Other arguments: see `absorbed_kernel`
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    work, part = tl.program_id(0), tl.program_id(1)
    row, group = work // HEADS, work % HEADS
    count = tl.minimum(tl.load(places + 2 * row) + 1, top_k)
    slots += row.to(tl.int64) * top_k
    lane = tl.arange(0, M)
    heads, live = group * GROUP + lane, lane < GROUP
    rows = tl.zeros_like(lane) + row
    plain = load_queries(q_latent, rows, heads, live, stride_latent, L, LP)
    few = tl.arange(0, RP)
    pointers = q_rope + (rows.to(tl.int64) * stride_rope + heads * stride_rope_head)[:, None] + few[None, :]
    turned = tl.load(pointers, mask=live[:, None] & (few < R)[None, :], other=0.0)
    sums = tl.zeros([M, LP], tl.float32)
    top = tl.zeros([M], tl.float32) + LOWEST
    weight = tl.zeros([M], tl.float32)
    start, end = part * span, tl.minimum(part * span + span, count)
    entry = start + tl.arange(0, TILE)
    slot = tl.load(slots + entry, mask=entry < end, other=0)
    for at in tl.range(start, end, TILE):
        entry = at + tl.arange(0, TILE)
        following = tl.load(slots + entry + TILE, mask=entry + TILE < end, other=0)
        seen = entry < end
        block, offset = (slot // SIZE).to(tl.int64), slot % SIZE
        keys, short = load_tokens(
            latent,
            rope,
            scales,
            block,
            offset,
            seen,
            latent_block,
            rope_block,
            plain.dtype,
            M,
            L,
            LP,
            R,
            RP,
            LATENT_TOKEN,
            ROPE_TOKEN,
        )
        scores = tl.dot(turned, tl.trans(short), input_precision=EXACT)
        scores = tl.dot(plain, tl.trans(keys), scores, input_precision=EXACT)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        sums, top, weight = accumulate(scores, scale, keys, sums, top, weight, EXACT)
        slot = following
    if v_scale is not None:
        sums *= v_scale
    if PARTS == 1:
        if count > 0:
            store_outputs(out, sums, top, weight, None, rows, heads, live, stride_latent, L, LP)
    else:
        place = (work.to(tl.int64) * PARTS + part) * M + lane
        store_part(sums_at, stats_at, sums, top, weight, place, live, L, LP)


@jit(do_not_specialize_on_alignment=["places"])
def join_kernel(
    out,
    places,
    sums_at,
    stats_at,
    stride_out,
    L: tl.constexpr,
    LP: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up the parts of a row for a head, all loaded at once. Grid (rows * HEADS, GROUP).

    stride_out   elements from row to row of out;  PADDED  PARTS padded to a power of two
    Other arguments: see `chosen_kernel`
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    work, lane = tl.program_id(0), tl.program_id(1)
    row, group = work // HEADS, work % HEADS
    if tl.load(places + 2 * row) >= 0:
        part, dims = tl.arange(0, PADDED), tl.arange(0, LP)
        place = (work.to(tl.int64) * PARTS + part) * M + lane
        inside = part < PARTS
        tops = tl.load(stats_at + 2 * place, mask=inside, other=LOWEST)
        shares = tl.exp2(tops - tl.max(tops, 0))
        weight = tl.sum(tl.load(stats_at + 2 * place + 1, mask=inside, other=0.0) * shares, 0)
        mask = inside[:, None] & (dims < L)[None, :]
        found = tl.load(sums_at + place[:, None] * L + dims[None, :], mask=mask, other=0.0)
        sums = tl.sum(found * shares[:, None], 0)
        pointers = out + row.to(tl.int64) * stride_out + (group * GROUP + lane) * L + dims
        tl.store(pointers, (sums / weight).to(out.dtype.element_ty), mask=dims < L)
