"""Attention to latents: all heads share a key, the latent and the rotated key side by side, whose latent is the value.

A program takes up to 64 pairs of (row, head) over a part of one context, so that a tile of latents is read from memory
once and used by all its heads twice. Rows, items and tiles are those of `quire.kernels.attention.triton_plan`, with the
heads of a program in the place of a KV head's; parts of a sequence are added up by a second kernel.
"""

from __future__ import annotations

from quire.kernels.attention.triton_tiles import (
    LOWEST,
    accumulate,
    block_ids,
    load_queries,
    load_tile,
    rescore,
    store_outputs,
    store_part,
)
from quire.kernels.triton_runtime import jit, tl


@jit
def absorbed_kernel(
    q_latent, q_rope, out, latent, rope, table, records, sums_at, stats_at, stride_latent, stride_rope,
    stride_rope_head, latent_block, rope_block, stride_table, scale, DECODES: tl.constexpr, EXACT: tl.constexpr,
    SIZE: tl.constexpr, TILE: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, HEADS: tl.constexpr, WORDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Programs: records (items when DECODES, else tiles) times HEADS groups of GROUP heads, side by side."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    work, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    record = records + work * WORDS
    row, num_rows, position = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    if DECODES:
        start, end, parts, index = tl.load(record + 3), tl.load(record + 4), tl.load(record + 5), tl.load(record + 7)
        position -= num_rows
    else:
        start, end, parts, index = 0, position + num_rows, 1, tl.load(record + 3)
    if row < 0:
        return
    table += index.to(tl.int64) * stride_table
    lane = tl.arange(0, M)
    rows, heads, live = row + lane // GROUP, head * GROUP + lane % GROUP, lane < num_rows * GROUP
    plain = load_queries(q_latent, rows, heads, live, stride_latent, L, LP)
    few = tl.arange(0, RP)
    pointers = q_rope + (rows.to(tl.int64) * stride_rope + heads * stride_rope_head)[:, None] + few[None, :]
    turned = tl.load(pointers, mask=live[:, None] & (few < R)[None, :], other=0.0)
    sums = tl.zeros([M, LP], tl.float32)
    top = tl.zeros([M], tl.float32) + LOWEST
    weight = tl.zeros([M], tl.float32)
    ids = block_ids(table, start, end, SIZE, TILE)
    for at in tl.range(start, end, TILE):
        upcoming = block_ids(table, at + TILE, end, SIZE, TILE)
        keys = load_tile(latent, ids, at, end, latent_block, L, True, SIZE, TILE, L, LP)
        short = load_tile(rope, ids, at, end, rope_block, R, True, SIZE, TILE, R, RP)
        scores = tl.dot(turned, tl.trans(short), input_precision=EXACT)
        scores = tl.dot(plain, tl.trans(keys), scores, input_precision=EXACT)
        scores, rest = rescore(scores, position + lane // GROUP, at, scale, 0.0, True, 0, False, TILE)
        sums, top, weight = accumulate(scores, rest, keys, sums, top, weight, EXACT)
        ids = upcoming
    if parts == 1:
        store_outputs(out, sums, top, weight, None, rows, heads, live, stride_latent, L, LP)
    else:
        place = (work.to(tl.int64) * HEADS + head) * ROWS + lane
        store_part(sums_at, stats_at, sums, top, weight, place, live, L, LP)


@jit
def merge_kernel(
    out, items, sums_at, stats_at, stride_out, L: tl.constexpr, LP: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, WORDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Add up a sequence's parts, always in the same order. Programs: items, HEADS and LANES of the ROWS lanes."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    CHUNKS: tl.constexpr = (ROWS + LANES - 1) // LANES
    work, head = tl.program_id(0) // (CHUNKS * HEADS), tl.program_id(0) // CHUNKS % HEADS
    record = items + work * WORDS
    row, num_rows, parts, first = tl.load(record), tl.load(record + 1), tl.load(record + 5), tl.load(record + 6)
    if (row < 0) | (parts == 1) | (work != first):
        return
    lane = tl.program_id(0) % CHUNKS * LANES + tl.arange(0, LANES)
    part, dims, live = tl.arange(0, PARTS), tl.arange(0, LP), lane < num_rows * GROUP
    base = (first.to(tl.int64) * HEADS + head) * ROWS + lane
    at, known = base[None, :] + part[:, None] * (HEADS * ROWS), (part < parts)[:, None] & live[None, :]
    tops = tl.load(stats_at + 2 * at, mask=known, other=LOWEST)
    top = tl.max(tops, 0)
    weight = tl.sum(tl.load(stats_at + 2 * at + 1, mask=known, other=0.0) * tl.exp2(tops - top[None, :]), 0)
    sums = tl.zeros([LANES, LP], tl.float32)
    mask = live[:, None] & (dims < L)[None, :]
    for turn in tl.range(0, parts, num_stages=4):
        place = base + turn * (HEADS * ROWS)
        share = tl.exp2(tl.load(stats_at + 2 * place, mask=live, other=LOWEST) - top)
        sums += tl.load(sums_at + place[:, None] * L + dims[None, :], mask=mask, other=0.0) * share[:, None]
    pointers = out + (row + lane // GROUP).to(tl.int64)[:, None] * stride_out
    pointers += ((head * GROUP + lane % GROUP) * L)[:, None] + dims[None, :]
    tl.store(pointers, (sums / weight[:, None]).to(out.dtype.element_ty), mask=mask)
