"""Latent attention without expansion: all heads share one key (latent and rotated key) and one value (the latent).

A program takes up to 64 pairs of (row, head) over a part of a context. It reads a tile of latents from memory once, and
all its heads use it twice, as key and as value. Rows, items and tiles are those of
`quire.kernels.attention.triton_plan`; the heads of a program stand for those of a KV head. Another kernel reads shared
prefixes (triton_shared). `merge_kernel` adds up the parts of a sequence.
"""

from __future__ import annotations

from quire.kernels.attention.triton_plan import unspecialized
from quire.kernels.attention.triton_tiles import (
    LOWEST,
    accumulate,
    block_ids,
    load_queries,
    rescore,
    store_outputs,
    store_part,
)
from quire.kernels.latent.triton_rows import load_latents
from quire.kernels.triton_runtime import jit, tl


@jit
def absorbed_kernel(
    q_latent,
    q_rope,
    out,
    latent,
    rope,
    scales,
    table,
    records,
    sums_at,
    stats_at,
    lse,
    row_positions,
    stride_latent,
    stride_rope,
    stride_rope_head,
    latent_block,
    rope_block,
    stride_table,
    scale,
    v_scale,
    DECODES: tl.constexpr,
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
    ROWS: tl.constexpr,
    M: tl.constexpr,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute attention over latents of an item (a part of a decode) or of a tile (rows of a longer sequence).

    Each program computes one group of heads. Grid (records * HEADS,).

    q_latent, q_rope           queries [T, H, L] and [T, H, R]
    out                        [T, H, L], output for sequences with one part
    stride_latent, stride_rope, stride_table   elements from row to row of q_latent and out, of q_rope, of table
    stride_rope_head           elements from head to head of q_rope
    latent, rope               cache [blocks, 1, SIZE, L] and [blocks, 1, SIZE, R]
    scales                     of the codes of latents [blocks, 1, SIZE, tiles], in a cache of rows, else None
    latent_block, rope_block   elements from block to block of latent, of rope
    LATENT_TOKEN, ROPE_TOKEN   elements from token to token of latent, of rope
    table                      block tables [slots or sequences, blocks] int32
    records, WORDS             `Plan.items` if DECODES, else `Plan.tiles`; number of words of a record
    sums_at, stats_at          `Plan.sums`, `Plan.stats`, outputs for sequences with several parts
    lse                        [T, H] float32, output for sequences with one part; None: nobody needs it
    row_positions              [T] int64 position of each row; None: the rows of a record are at consecutive positions
    scale, EXACT               softmax scale * log2(e); precision of float32 products
    v_scale                    scale of all codes of an 8-bit cache, else None
    SIZE, TILE                 tokens of a block; tokens of a tile of keys
    L, LP, R, RP               widths of latent and rotated key, each also padded to a power of two
    HEADS, GROUP               number of groups of heads; heads of a group (of a program)
    ROWS, M                    lanes of a sequence, GROUP times its largest number of rows; lanes of a program
    SHARED                     True: the step has shared prefixes, whose parts `shared_kernel` has written
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    work, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    record = records + work * WORDS
    row, num_rows, position = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    if DECODES:
        start, end, parts, index = tl.load(record + 3), tl.load(record + 4), tl.load(record + 5), tl.load(record + 7)
        position -= num_rows
        if SHARED:
            parts += tl.load(record + 8)
    else:
        start, end, parts, index = 0, position + num_rows, 1, tl.load(record + 3)
    if row < 0:
        return
    table += index.to(tl.int64) * stride_table
    lane = tl.arange(0, M)
    rows, heads, live = row + lane // GROUP, head * GROUP + lane % GROUP, lane < num_rows * GROUP
    if row_positions is None:
        positions = position + lane // GROUP
    else:
        positions = tl.load(row_positions + rows, mask=live, other=0).to(tl.int32)
        end = tl.minimum(end, tl.max(positions, 0) + 1)
    sums, top, weight = attend_latents(
        q_latent,
        q_rope,
        rows,
        heads,
        live,
        positions,
        latent,
        rope,
        scales,
        table,
        start,
        end,
        stride_latent,
        stride_rope,
        stride_rope_head,
        latent_block,
        rope_block,
        scale,
        True,
        EXACT,
        SIZE,
        TILE,
        L,
        LP,
        R,
        RP,
        LATENT_TOKEN,
        ROPE_TOKEN,
        M,
    )
    if v_scale is not None:
        sums *= v_scale
    if parts == 1:
        store_outputs(out, sums, top, weight, None, rows, heads, live, stride_latent, L, LP)
        if lse is not None:
            store_lse(lse + rows.to(tl.int64) * (HEADS * GROUP) + heads, top, weight, live)
    else:
        place = (work.to(tl.int64) * HEADS + head) * ROWS + lane
        store_part(sums_at, stats_at, sums, top, weight, place, live, L, LP)


@jit
def attend_latents(
    q_latent,
    q_rope,
    rows,
    heads,
    live,
    positions,
    latent,
    rope,
    scales,
    table,
    start,
    end,
    stride_latent,
    stride_rope,
    stride_rope_head,
    latent_block,
    rope_block,
    scale,
    MASKED: tl.constexpr,
    EXACT: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    LATENT_TOKEN: tl.constexpr,
    ROPE_TOKEN: tl.constexpr,
    M: tl.constexpr,
):
    """Compute the softmax of M pairs (row, head) over tokens start .. end - 1 of a context.

    Returns weighted sums of latents [M, LP], maxima [M] (base 2) and sums of weights [M].

    positions   [M] position of each row
    live        [M] False for padding
    table       pointer to the sequence's row of the block table
    MASKED      False: (end - start) % TILE == 0 and every row sees all tokens

    Other arguments: see `absorbed_kernel`.
    """
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
        keys, short = load_latents(
            latent,
            rope,
            scales,
            ids,
            at,
            end,
            latent_block,
            rope_block,
            plain.dtype,
            M,
            MASKED,
            SIZE,
            TILE,
            L,
            LP,
            R,
            RP,
            LATENT_TOKEN,
            ROPE_TOKEN,
        )
        scores = tl.dot(turned, tl.trans(short), input_precision=EXACT)
        scores = tl.dot(plain, tl.trans(keys), scores, input_precision=EXACT)
        scores, rest = rescore(scores, positions, at, scale, 0.0, MASKED, 0, False, TILE)
        sums, top, weight = accumulate(scores, rest, keys, sums, top, weight, EXACT)
        ids = upcoming
    return sums, top, weight


@jit
def store_lse(pointers, top, weight, live):
    """Store the natural logarithms of sums of weights [M], of maxima `top` in base 2. Without tokens it is -inf."""
    tl.store(pointers, (top + tl.log2(weight)) * 0.6931471805599453, mask=live)


@unspecialized("num_seqs")
def merge_kernel(
    out,
    items,
    sums_at,
    stats_at,
    lse,
    num_seqs,
    stride_out,
    L: tl.constexpr,
    LP: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up the parts of each sequence, always in the same order: its own parts, then those of its shared prefix.

    The grid has any size: programs divide the work, which is num_seqs * HEADS * ceil(ROWS / LANES) pieces.

    out, stride_out     [T, H, L], output; elements from row to row of out
    items, WORDS        `Plan.items`; number of words of an item
    sums_at, stats_at   `Plan.sums`, `Plan.stats`
    lse                 [T, H] float32, output; None: nobody needs it
    LANES, ROWS         lanes (pairs of row and head) of a piece; lanes of a sequence
    PARTS               upper bound of the parts of a sequence
    L .. GROUP, SHARED  as in `absorbed_kernel`
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    CHUNKS: tl.constexpr = (ROWS + LANES - 1) // LANES
    for work in tl.range(tl.program_id(0), num_seqs * HEADS * CHUNKS, tl.num_programs(0)):
        first = tl.load(items + work // (CHUNKS * HEADS) * WORDS + 10)
        if first >= 0:
            _merge(
                out,
                items + first * WORDS,
                sums_at,
                stats_at,
                lse,
                stride_out,
                work // CHUNKS % HEADS,
                work % CHUNKS * LANES + tl.arange(0, LANES),
                L,
                LP,
                GROUP,
                ROWS,
                LANES,
                HEADS,
                PARTS,
                SHARED,
            )


@jit
def _merge(
    out,
    record,
    sums_at,
    stats_at,
    lse,
    stride_out,
    head,
    lane,
    L: tl.constexpr,
    LP: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Add up the parts of a sequence for some of its lanes; AT_ONCE parts are read at the same time.

    record   first item of the sequence;  head  group of heads;  lane  [LANES]
    """
    row, num_rows, own, first = tl.load(record), tl.load(record + 1), tl.load(record + 5), tl.load(record + 6)
    parts, prefix = own, 0
    if SHARED:
        parts, prefix = own + tl.load(record + 8), tl.load(record + 9) - own
    part, dims, live = tl.arange(0, PARTS), tl.arange(0, LP), lane < num_rows * GROUP
    places = (tl.where(part < own, first, prefix) + part).to(tl.int64) * HEADS + head
    at, known = places[:, None] * ROWS + lane[None, :], (part < parts)[:, None] & live[None, :]
    tops = tl.load(stats_at + 2 * at, mask=known, other=LOWEST)
    top = tl.max(tops, 0)
    weight = tl.sum(tl.load(stats_at + 2 * at + 1, mask=known, other=0.0) * tl.exp2(tops - top[None, :]), 0)
    sums = tl.zeros([LANES, LP], tl.float32)
    mask = live[:, None] & (dims < L)[None, :]
    AT_ONCE: tl.constexpr = 16 // LANES  # 64 registers a thread for latents of 512
    for start in range(0, parts, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            turn = start + step
            place = ((tl.where(turn < own, first, prefix) + turn).to(tl.int64) * HEADS + head) * ROWS + lane
            share = tl.exp2(tl.load(stats_at + 2 * place, mask=live & (turn < parts), other=LOWEST) - top)
            part_sums = tl.load(sums_at + place[:, None] * L + dims[None, :], mask=mask & (turn < parts), other=0.0)
            sums += part_sums * share[:, None]
    pointers = out + (row + lane // GROUP).to(tl.int64)[:, None] * stride_out
    pointers += ((head * GROUP + lane % GROUP) * L)[:, None] + dims[None, :]
    tl.store(pointers, (sums / weight[:, None]).to(out.dtype.element_ty), mask=mask)
    if lse is not None:
        place = (row + lane // GROUP).to(tl.int64) * (HEADS * GROUP) + head * GROUP + lane % GROUP
        store_lse(lse + place, top, weight, live)
