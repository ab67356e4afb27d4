"""Functions that the attention kernels of a GPU share: tiles of keys or values, and the running softmax over tiles.

Scores are in base 2: `scale` contains log2(e). A row that has seen no key has the finite maximum LOWEST, so that no NaN
appears; NaN or infinity in a key or a value still shows in the output. Common names:

    M, TILE              rows (lanes) of a tile of queries: pairs (token, query head); tokens of a tile of keys
    D, DP                size of a head; padded to a power of two
    SIZE                 tokens of a KV block
    sums, top, weight    state of the softmax: [M, DP] weighted sums of values, [M] maximum, [M] sum of weights
    positions            [M] position of each row's token: it sees keys up to there
    WINDOW               tokens that a row sees, 0: all; below 0: it sees its own chunk of -WINDOW tokens, up to itself
    CAPPED, cap          soft cap of the scores, see `rescore`
    EXACT                precision of float32 products: "ieee" or "tf32"
"""

from __future__ import annotations

from quire.kernels.triton_runtime import INTERPRETED, jit, tl

LOG2E = 1.4426950408889634
LOWEST = None if tl is None else tl.constexpr(-1e30)
NO_ASSEMBLY = None if tl is None else tl.constexpr(INTERPRETED)


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
    base,
    ids,
    start,
    end,
    stride_block,
    stride_token,
    GUARDED: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
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
    scores,
    positions,
    start,
    scale,
    cap,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,
):
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
        if WINDOW < 0:
            seen = seen & (columns[None, :] >= (positions - positions % -WINDOW)[:, None])
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
    q,
    sums,
    top,
    weight,
    positions,
    k,
    v,
    table,
    start,
    end,
    stride_block,
    stride_token,
    scale,
    cap,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """Add tokens start .. end - 1 of a context to the running softmax of a KV head. Returns sums, top, weight.

    sums, top, weight   state of the softmax, see `accumulate`
    q       [M, DP] queries
    k, v    pointers to the head in block 0
    table   pointer to the sequence's row of the block table
    MASKED  False: (end - start) % TILE == 0 and every row sees all tokens

    Other arguments: see `load_tile`, `rescore` and the top of this file.
    """
    CODED: tl.constexpr = k.dtype.element_ty.primitive_bitwidth == 8
    if CODED:
        q = half(q)
    if CODED and q.shape[0] <= 32 and D == DP and D >= 64:
        sums, top, weight = _attend_words(
            q,
            sums,
            top,
            weight,
            positions,
            k,
            v,
            table,
            start,
            end,
            stride_block,
            stride_token,
            scale,
            cap,
            MASKED,
            WINDOW,
            CAPPED,
            EXACT,
            SIZE,
            TILE,
            D,
        )
    else:
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
def _attend_words(
    q,
    sums,
    top,
    weight,
    positions,
    k,
    v,
    table,
    start,
    end,
    stride_block,
    stride_token,
    scale,
    cap,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    EXACT: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
):
    """Do the work of `attend` for 8-bit codes and few rows, with values loaded as words of four codes.

    The matrix units want pairs of tokens for each column of the values, which lie a row apart. Single codes would take
    a load from shared memory each. A word has one code for each of four products: sums of columns 0, 4, ..; 1, 5, ..
    """
    M: tl.constexpr = q.shape[0]
    W: tl.constexpr = D // 4
    words, before = v.to(tl.pointer_type(tl.int32)), top
    zero = tl.zeros([M, W], tl.float32)
    s0, s1, s2, s3 = zero, zero, zero, zero
    ids = block_ids(table, start, end, SIZE, TILE)
    for at in tl.range(start, end, TILE):
        upcoming = block_ids(table, at + TILE, end, SIZE, TILE)
        keys = load_tile(k, ids, at, end, stride_block, stride_token, False, SIZE, TILE, D, D).to(q.dtype)
        values = load_tile(words, ids, at, end, stride_block // 4, stride_token // 4, MASKED, SIZE, TILE, W, W)
        scores = tl.dot(q, tl.trans(keys), input_precision=EXACT)
        scores, rest = rescore(scores, positions, at, scale, cap, MASKED, WINDOW, CAPPED, TILE)
        above = tl.maximum(top, tl.max(scores, 1) * rest)
        weights = tl.exp2(scores * rest - above[:, None])
        decay = tl.exp2(top - above)
        weight = weight * decay + tl.sum(weights, 1)
        top = above
        weights = weights.to(q.dtype)
        v0, v1, v2, v3 = _halves(values, v.dtype.element_ty)
        s0 = tl.dot(weights, v0.to(q.dtype), s0 * decay[:, None], input_precision=EXACT)
        s1 = tl.dot(weights, v1.to(q.dtype), s1 * decay[:, None], input_precision=EXACT)
        s2 = tl.dot(weights, v2.to(q.dtype), s2 * decay[:, None], input_precision=EXACT)
        s3 = tl.dot(weights, v3.to(q.dtype), s3 * decay[:, None], input_precision=EXACT)
        ids = upcoming
    added = tl.reshape(tl.join(tl.join(s0, s2), tl.join(s1, s3)), [M, D])
    return sums * tl.exp2(before - top)[:, None] + added, top, weight


@jit
def _halves(words, DTYPE: tl.constexpr):
    """Return the four 8-bit codes of each int32 word as float16, the lowest byte first.

    The assembly converts two words at a time, because a register of an operand holds a code of each.
    """
    if NO_ASSEMBLY:
        a = (words & 255).to(tl.uint8).to(DTYPE, bitcast=True).to(tl.float16)
        b = ((words >> 8) & 255).to(tl.uint8).to(DTYPE, bitcast=True).to(tl.float16)
        c = ((words >> 16) & 255).to(tl.uint8).to(DTYPE, bitcast=True).to(tl.float16)
        d = ((words >> 24) & 255).to(tl.uint8).to(DTYPE, bitcast=True).to(tl.float16)
    elif DTYPE == tl.float8e4nv:
        a, b, c, d = tl.inline_asm_elementwise(
            """{ .reg .b16 a, b, c, d; .reg .b32 p, q, r, s; mov.b32 {a, b}, $4; mov.b32 {c, d}, $5;
            cvt.rn.f16x2.e4m3x2 p, a; cvt.rn.f16x2.e4m3x2 q, b; cvt.rn.f16x2.e4m3x2 r, c; cvt.rn.f16x2.e4m3x2 s, d;
            prmt.b32 $0, p, r, 0x5410; prmt.b32 $1, p, r, 0x7632;
            prmt.b32 $2, q, s, 0x5410; prmt.b32 $3, q, s, 0x7632; }""",
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:  # e5m2 is the upper half of a float16
        a, b, c, d = tl.inline_asm_elementwise(
            """{ .reg .b32 p, q, r, s; prmt.b32 p, $4, $5, 0x4000; prmt.b32 q, $4, $5, 0x5010;
            prmt.b32 r, $4, $5, 0x6020; prmt.b32 s, $4, $5, 0x7030; and.b32 $0, p, 0xFF00FF00;
            and.b32 $1, q, 0xFF00FF00; and.b32 $2, r, 0xFF00FF00; and.b32 $3, s, 0xFF00FF00; }""",
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return a, b, c, d


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


@jit
def merge_parts(
    out,
    sums_at,
    stats_at,
    sinks,
    row,
    head,
    begin,
    end,
    first,
    parts,
    prefix_first,
    prefix_parts,
    stride_out,
    D: tl.constexpr,
    DP: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add up the parts of the softmax of a sequence, or of a tile of its rows, for a KV head; store the result.

    row, begin, end               first row; the lanes begin .. end - 1 are added, at most M
    first, parts                  own parts: index of the first, number
    prefix_first, prefix_parts    parts of a shared prefix: index of the first, number
    head                          KV head
    ROWS                          lanes of a part in sums_at and stats_at, see `store_part`
    PARTS                         upper bound of the number of parts

    Other arguments as in `decode_kernel`. All lanes are added side by side, parts one after the other; AT_ONCE of them
    are read at the same time.
    """
    AT_ONCE: tl.constexpr = 4 if M * DP <= 2048 or ROWS * DP <= 1024 else 1
    part, lane, dims = tl.arange(0, PARTS), begin + tl.arange(0, M), tl.arange(0, DP)
    live, total = lane < end, parts + prefix_parts
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
            part_sums = tl.load(
                sums_at + lanes[:, None] * D + dims[None, :],
                mask=inside & (turn < total),
                other=0.0,
                cache_modifier=".cg",
            )
            sums += part_sums * share[:, None]
    pointers = out + ((row + lane // GROUP).to(tl.int64) * stride_out + query_head * D)[:, None] + dims[None, :]
    tl.store(pointers, (sums / weight[:, None]).to(out.dtype.element_ty), mask=inside)
