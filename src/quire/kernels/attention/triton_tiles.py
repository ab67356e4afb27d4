"""What the attention kernels of a GPU share: reading a tile of keys or values, and the running softmax over tiles.

Scores are kept in base 2: scale carries log2(e). A row that has seen nothing has the finite maximum LOWEST, so that
nothing becomes NaN that was not: what is NaN or infinite in a key or a value shows in the output. Rows of a tile are
pairs (token, query head), the heads of one KV head side by side. SIZE is the block size.
"""

from __future__ import annotations

from quire.kernels.triton_runtime import jit, tl

LOG2E = 1.4426950408889634
LOWEST = None if tl is None else tl.constexpr(-1e30)


@jit
def finite(values, MOST: tl.constexpr = 3.38e38):
    """Values for the cache: a weight of 0 must make nothing of them, for tiles are multiplied whole and their last rows
    may be another's. The largest number, or MOST, stands for what is none; a hidden state's NaN shows in its key."""
    most: tl.constexpr = 65504.0 if values.dtype == tl.float16 else MOST
    wide = values.to(tl.float32)
    return tl.where(tl.abs(wide) <= most, wide, most).to(values.dtype)


@jit
def block_ids(table, start, end, SIZE: tl.constexpr, TILE: tl.constexpr):
    """The block of the tile that begins at token `start`; of each of its tokens [TILE] when blocks are not whole tiles.
    Nothing is read at and after `end`."""
    if SIZE % TILE == 0:
        ids = tl.load(table + start // SIZE, mask=start < end, other=0)
    else:
        tokens = start + tl.arange(0, TILE)
        ids = tl.load(table + tokens // SIZE, mask=tokens < end, other=0)
    return ids


@jit
def load_tile(
    base, ids, start, end, stride_block, stride_token,
    GUARDED: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Keys or values [TILE, DP] of one head; zero past `end` when GUARDED, and past D."""
    lanes, dims = tl.arange(0, TILE), tl.arange(0, DP)
    if SIZE % TILE == 0:
        first = base + ids.to(tl.int64) * stride_block + (start % SIZE) * stride_token
        pointers = first + (lanes[:, None] * stride_token + dims[None, :])
    else:
        rows = ids.to(tl.int64) * stride_block + ((start + lanes) % SIZE) * stride_token
        pointers = base + rows[:, None] + dims[None, :]
    if GUARDED:
        tile = tl.load(pointers, mask=((start + lanes) < end)[:, None] & (dims < D)[None, :], other=0.0)
    elif D < DP:
        tile = tl.load(pointers, mask=(dims < D)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@jit
def rescore(
    scores, positions, start, scale, cap,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Products [M, TILE] after soft cap and mask, and what is left to multiply them with."""
    if CAPPED:  # cap * tanh(scale * q . k / cap): scale is divided by cap, cap carries log2(e)
        scores = cap * (1.0 - 2.0 / (tl.exp2(2.0 * 1.4426950408889634 * scale * scores) + 1.0))
        scale = 1.0
    if MASKED:
        columns = start + tl.arange(0, TILE)
        seen = columns[None, :] <= positions[:, None]
        if WINDOW > 0:
            seen = seen & (columns[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    return scores, scale


@jit
def accumulate(scores, scale, values, sums, top, weight, EXACT: tl.constexpr):
    """One step of the running softmax: scores [M, TILE], values [TILE, DP]."""
    above = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - above[:, None])
    decay = tl.exp2(top - above)
    weight = weight * decay + tl.sum(weights, 1)
    sums = tl.dot(weights.to(values.dtype), values, sums * decay[:, None], input_precision=EXACT)
    return sums, above, weight


@jit
def attend(
    q, sums, top, weight, positions, k, v, table, start, end, stride_block, stride_token, scale, cap,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr, SIZE: tl.constexpr,
    TILE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Tokens start .. end of one context and KV head; unless MASKED, (end - start) % TILE == 0 and every row sees all.
    `k` and `v` point to the head in block 0, `table` to the sequence's blocks."""
    ids = block_ids(table, start, end, SIZE, TILE)
    for at in tl.range(start, end, TILE):
        upcoming = block_ids(table, at + TILE, end, SIZE, TILE)
        keys = load_tile(k, ids, at, end, stride_block, stride_token, False, SIZE, TILE, D, DP)
        values = load_tile(v, ids, at, end, stride_block, stride_token, MASKED, SIZE, TILE, D, DP)
        scores = tl.dot(q, tl.trans(keys), input_precision=EXACT)
        scores, rest = rescore(scores, positions, at, scale, cap, MASKED, WINDOW, CAPPED, TILE)
        sums, top, weight = accumulate(scores, rest, values, sums, top, weight, EXACT)
        ids = upcoming
    return sums, top, weight


@jit
def load_queries(q, rows, heads, live, stride, D: tl.constexpr, DP: tl.constexpr):
    """Queries [M, DP] of (row, head) pairs, zero where not live."""
    dims = tl.arange(0, DP)
    pointers = q + rows.to(tl.int64)[:, None] * stride + (heads * D)[:, None] + dims[None, :]
    return tl.load(pointers, mask=live[:, None] & (dims < D)[None, :], other=0.0)


@jit
def store_outputs(out, sums, top, weight, sinks, rows, heads, live, stride, D: tl.constexpr, DP: tl.constexpr):
    """The softmax-weighted sums [M, DP] of (row, head) pairs, a sink's weight added."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=live, other=0.0).to(tl.float32)
        weight += tl.exp2(sink * 1.4426950408889634 - top)
    dims = tl.arange(0, DP)
    pointers = out + rows.to(tl.int64)[:, None] * stride + (heads * D)[:, None] + dims[None, :]
    mask = live[:, None] & (dims < D)[None, :]
    tl.store(pointers, (sums / weight[:, None]).to(out.dtype.element_ty), mask=mask)


@jit
def store_part(sums_at, stats_at, sums, top, weight, at, live, D: tl.constexpr, DP: tl.constexpr):
    """Keep a part of some rows' softmax: row r at index at[r]."""
    dims = tl.arange(0, DP)
    tl.store(stats_at + 2 * at, top, mask=live)
    tl.store(stats_at + 2 * at + 1, weight, mask=live)
    tl.store(sums_at + at[:, None] * D + dims[None, :], sums, mask=live[:, None] & (dims < D)[None, :])
