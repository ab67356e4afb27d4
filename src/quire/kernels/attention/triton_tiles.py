"""Functions that the attention kernels of a GPU share: tiles of keys or values, and the running softmax over tiles.

Scores are in base 2: `scale` contains log2(e). A row that has seen no key has the finite maximum LOWEST, so that no NaN
appears; NaN or infinity in a key or a value still shows in the output. Common names:

    M, TILE              rows (lanes) of a tile of queries: pairs (token, query head); tokens of a tile of keys
    D, DP                size of a head; padded to a power of two
    SIZE                 tokens of a KV block
    sums, top, weight    state of the softmax: [M, DP] weighted sums of values, [M] maximum, [M] sum of weights
    positions            [M] position of each row's token: it sees keys up to there
    WINDOW               tokens that a row sees, 0: all
    CAPPED, cap          soft cap of the scores, see `rescore`
    EXACT                precision of float32 products: "ieee" or "tf32"
"""

from __future__ import annotations

from quire.kernels.triton_runtime import jit, tl

LOG2E = 1.4426950408889634
LOWEST = None if tl is None else tl.constexpr(-1e30)


@jit
def finite(values, MOST: tl.constexpr = 3.38e38):
    """Return `values` with NaN and every magnitude above MOST (float16: 65504) replaced by MOST.

    The cache holds only such numbers: kernels multiply whole tiles, and the last rows of a tile may belong to another
    sequence. These rows have weight 0 and must add 0, so they must be finite. A NaN in a hidden state makes a huge key.
    """
    most: tl.constexpr = 65504.0 if values.dtype == tl.float16 else MOST
    wide = values.to(tl.float32)
    return tl.where(tl.abs(wide) <= most, wide, most).to(values.dtype)


@jit
def coded(numbers, inverse, DTYPE: tl.constexpr):
    """Return `numbers` as codes of type DTYPE for an 8-bit cache (see `eight_bits.py`). inverse: 1 / scale."""
    most: tl.constexpr = 448.0 if DTYPE == tl.float8e4nv else 57344.0
    bound = tl.full(numbers.shape, most, tl.float32)
    wide = numbers.to(tl.float32) * inverse
    return tl.clamp(wide, -bound, bound, propagate_nan=tl.PropagateNan.ALL).to(DTYPE)


@jit
def half(queries):
    """Convert bfloat16 queries to float16, for the product with 8-bit keys. Other types stay as they are.

    8-bit keys are exact in float16. bfloat16 is exact in float16 between 6e-5 and 65504; larger numbers are clamped.
    """
    if queries.dtype == tl.bfloat16:
        most = tl.full(queries.shape, 65504.0, tl.float32)
        queries = tl.clamp(queries.to(tl.float32), -most, most, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return queries


@jit
def block_ids(table, start, end, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Return the block id of the tile that begins at token `start`, or an id per token [TILE] if SIZE % TILE > 0.

    Entries of `table` for token `end` and later tokens are not read.
    """
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
    """Load keys or values [TILE, DP] of a head, for TILE tokens from `start` on. Columns from D on are zero.

    GUARDED                       True: rows from token `end` on are zero
    base                          pointer to the head in block 0
    ids                           result of `block_ids`
    stride_block, stride_token    elements from block to block, from token to token
    """
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
    """Apply soft cap and mask to scores = q . k [M, TILE]. Return the scores, and the factor still to multiply them by.

    start   first token of the tile
    scale   softmax scale * log2(e); if CAPPED: softmax scale / c, where c is the soft cap
    cap     if CAPPED: c * log2(e)
    MASKED  True: keys that a row does not see get -inf
    """
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
    """Add a tile, with scores * scale [M, TILE] and values [TILE, DP], to the running softmax. Return its new state.

    sums, top, weight   the state: weighted sums of values [M, DP], maximum scores [M], sums of weights [M]
    """
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
    """Add tokens start .. end - 1 of a context to the running softmax of a KV head. Returns sums, top, weight.

    sums, top, weight   state of the softmax, see `accumulate`
    q       [M, DP] queries
    k, v    pointers to the head in block 0
    table   pointer to the sequence's row of the block table
    MASKED  False: (end - start) % TILE == 0 and every row sees all tokens

    Other arguments: see `load_tile`, `rescore` and the top of this file.
    """
    if k.dtype.element_ty.primitive_bitwidth == 8:
        q = half(q)
    ids = block_ids(table, start, end, SIZE, TILE)
    for at in tl.range(start, end, TILE):
        upcoming = block_ids(table, at + TILE, end, SIZE, TILE)
        keys = load_tile(k, ids, at, end, stride_block, stride_token, False, SIZE, TILE, D, DP).to(q.dtype)
        values = load_tile(v, ids, at, end, stride_block, stride_token, MASKED, SIZE, TILE, D, DP).to(q.dtype)
        scores = tl.dot(q, tl.trans(keys), input_precision=EXACT)
        scores, rest = rescore(scores, positions, at, scale, cap, MASKED, WINDOW, CAPPED, TILE)
        sums, top, weight = accumulate(scores, rest, values, sums, top, weight, EXACT)
        ids = upcoming
    return sums, top, weight


@jit
def load_queries(q, rows, heads, live, stride, D: tl.constexpr, DP: tl.constexpr):
    """Load the queries [M, DP] of M pairs: token rows[i], head heads[i]. Rows with live[i] False are zero.

    stride   elements from row to row of q
    """
    dims = tl.arange(0, DP)
    pointers = q + rows.to(tl.int64)[:, None] * stride + (heads * D)[:, None] + dims[None, :]
    return tl.load(pointers, mask=live[:, None] & (dims < D)[None, :], other=0.0)


@jit
def store_outputs(out, sums, top, weight, sinks, rows, heads, live, stride, D: tl.constexpr, DP: tl.constexpr):
    """Store sums / weight, the attention output, of M pairs: token rows[i], head heads[i], if live[i].

    sinks    [H] scores whose weights are added before the division; None: no sinks
    stride   elements from row to row of out
    """
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=live, other=0.0).to(tl.float32)
        weight += tl.exp2(sink * 1.4426950408889634 - top)
    dims = tl.arange(0, DP)
    pointers = out + rows.to(tl.int64)[:, None] * stride + (heads * D)[:, None] + dims[None, :]
    mask = live[:, None] & (dims < D)[None, :]
    tl.store(pointers, (sums / weight[:, None]).to(out.dtype.element_ty), mask=mask)


@jit
def store_part(sums_at, stats_at, sums, top, weight, at, live, D: tl.constexpr, DP: tl.constexpr):
    """Store the softmax state of M lanes: lane r at index at[r] of sums_at [., D] and stats_at [., 2] (top, weight)."""
    dims = tl.arange(0, DP)
    tl.store(stats_at + 2 * at, top, mask=live)
    tl.store(stats_at + 2 * at + 1, weight, mask=live)
    tl.store(sums_at + at[:, None] * D + dims[None, :], sums, mask=live[:, None] & (dims < D)[None, :])
