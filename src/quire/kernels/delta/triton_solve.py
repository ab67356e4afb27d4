"""The triangular systems of chunks of prompts: T, U and W of the gated delta rule, in blocks of 16 rows.

See `quire.kernels.delta.triton_prompts` for the formulas. A is strictly lower, T = (I + A)^-1. Blocks of 16 rows come
from the inverses of smaller ones: with D the inverse of the diagonal blocks of n rows, and L those parts of A that lie
inside blocks of 2 n rows and outside of those of n, D - D L D is the inverse of the blocks of 2 n rows. The blocks of
16 rows follow each other by substitution. Powers of A would be shorter, but lose all digits when keys are alike.

A program is one warp: its products are those of a warp, whose operands go through registers, and no warp waits for
another. With warpgroups Triton 3.6 made wrong addresses of their operands in the loop of D.
"""

from __future__ import annotations

from quire.kernels.delta.triton_rows import convolved, log_decay
from quire.kernels.triton_runtime import jit, tl


@jit
def _inverse(a, PRODUCTS: tl.constexpr):
    """Return (I + a)^-1 of a strictly lower a [16, 16]."""
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    d = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, a, 0.0)
    for level in tl.static_range(1, 4):
        lower = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level)
        d -= tl.dot(tl.dot(d, tl.where(lower, a, 0.0), input_precision=PRODUCTS), d, input_precision=PRODUCTS)
    return d


@jit
def _block(
    keys, key, c, b, rows, stride, ROW: tl.constexpr, COLUMN: tl.constexpr, DK: tl.constexpr, PRODUCTS: tl.constexpr
):
    """Return block [16, 16] of A: rows of block ROW and columns of block COLUMN of a chunk.

    keys   the chunk's first row; stride  from row to row
    c, b   tuples by block: sums of g, strengths
    """
    flat = tl.arange(0, 16)
    row, column = ROW * 16 + flat[:, None], COLUMN * 16 + flat[None, :]
    left = tl.load(keys + row * stride + key[None, :], mask=(row < rows) & (key < DK)[None, :], other=0.0)
    right = tl.load(keys + column * stride + key[:, None], mask=(column < rows) & (key < DK)[:, None], other=0.0)
    a = tl.dot(left, right, input_precision=PRODUCTS) * b[ROW][:, None]
    a *= tl.exp(tl.minimum(c[ROW][:, None] - c[COLUMN][None, :], 0.0))
    return tl.where(row > column, a, 0.0)


@jit
def _solved(a, b, PRODUCTS: tl.constexpr):
    """Return -a b."""
    return -tl.dot(a, b, input_precision=PRODUCTS)


@jit
def _inverses(keys, key, c, b, rows, stride, DK: tl.constexpr, PRODUCTS: tl.constexpr):
    """Return the blocks [16, 16] of T of a chunk, row by row. See `_block`.

    A block below the diagonal is -T_ii (sum over k from j to i - 1 of A_ik T_kj).
    """
    t00 = _inverse(_block(keys, key, c, b, rows, stride, 0, 0, DK, PRODUCTS), PRODUCTS)
    t11 = _inverse(_block(keys, key, c, b, rows, stride, 1, 1, DK, PRODUCTS), PRODUCTS)
    t22 = _inverse(_block(keys, key, c, b, rows, stride, 2, 2, DK, PRODUCTS), PRODUCTS)
    t33 = _inverse(_block(keys, key, c, b, rows, stride, 3, 3, DK, PRODUCTS), PRODUCTS)
    a10 = _block(keys, key, c, b, rows, stride, 1, 0, DK, PRODUCTS)
    t10 = _solved(t11, tl.dot(a10, t00, input_precision=PRODUCTS), PRODUCTS)
    a20 = _block(keys, key, c, b, rows, stride, 2, 0, DK, PRODUCTS)
    a21 = _block(keys, key, c, b, rows, stride, 2, 1, DK, PRODUCTS)
    x = tl.dot(a20, t00, input_precision=PRODUCTS)
    t20 = _solved(t22, tl.dot(a21, t10, x, input_precision=PRODUCTS), PRODUCTS)
    t21 = _solved(t22, tl.dot(a21, t11, input_precision=PRODUCTS), PRODUCTS)
    a30 = _block(keys, key, c, b, rows, stride, 3, 0, DK, PRODUCTS)
    a31 = _block(keys, key, c, b, rows, stride, 3, 1, DK, PRODUCTS)
    a32 = _block(keys, key, c, b, rows, stride, 3, 2, DK, PRODUCTS)
    x = tl.dot(a31, t10, tl.dot(a30, t00, input_precision=PRODUCTS), input_precision=PRODUCTS)
    t30 = _solved(t33, tl.dot(a32, t20, x, input_precision=PRODUCTS), PRODUCTS)
    x = tl.dot(a31, t11, input_precision=PRODUCTS)
    t31 = _solved(t33, tl.dot(a32, t21, x, input_precision=PRODUCTS), PRODUCTS)
    t32 = _solved(t33, tl.dot(a32, t22, input_precision=PRODUCTS), PRODUCTS)
    return t00, t10, t11, t20, t21, t22, t30, t31, t32, t33


@jit
def _store_products(t, x, place, rows, stride, inside, PRODUCTS: tl.constexpr):
    """Write T x, [64, n] in four blocks of rows. place: pointers [1, n] of the first row; inside: columns to write."""
    flat = tl.arange(0, 16)[:, None]
    y = tl.dot(t[0], x[0], input_precision=PRODUCTS)
    tl.store(place + flat * stride, y.to(x[0].dtype), mask=inside & (flat < rows))
    y = tl.dot(t[2], x[1], tl.dot(t[1], x[0], input_precision=PRODUCTS), input_precision=PRODUCTS)
    tl.store(place + (16 + flat) * stride, y.to(x[0].dtype), mask=inside & (16 + flat < rows))
    y = tl.dot(t[4], x[1], tl.dot(t[3], x[0], input_precision=PRODUCTS), input_precision=PRODUCTS)
    y = tl.dot(t[5], x[2], y, input_precision=PRODUCTS)
    tl.store(place + (32 + flat) * stride, y.to(x[0].dtype), mask=inside & (32 + flat < rows))
    y = tl.dot(t[7], x[1], tl.dot(t[6], x[0], input_precision=PRODUCTS), input_precision=PRODUCTS)
    y = tl.dot(t[9], x[3], tl.dot(t[8], x[2], y, input_precision=PRODUCTS), input_precision=PRODUCTS)
    tl.store(place + (48 + flat) * stride, y.to(x[0].dtype), mask=inside & (48 + flat < rows))


@jit
def _narrow(t, dtype: tl.constexpr):
    """Return blocks in another dtype."""
    return (
        t[0].to(dtype), t[1].to(dtype), t[2].to(dtype), t[3].to(dtype), t[4].to(dtype),
        t[5].to(dtype), t[6].to(dtype), t[7].to(dtype), t[8].to(dtype), t[9].to(dtype),
    )  # fmt: skip


@jit
def _weighted(place, weight, rows, stride, inside, ROW: tl.constexpr):
    """Return block ROW of keys [16, n] times the weights of its rows."""
    i = ROW * 16 + tl.arange(0, 16)[:, None]
    x = tl.load(place + i * stride, mask=inside & (i < rows), other=0.0)
    return (x.to(tl.float32) * weight[:, None]).to(x.dtype)


@jit
def _values(
    source,
    conv,
    before,
    past,
    channel,
    b,
    rows,
    inside,
    ROW: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    dtype: tl.constexpr,
):
    """Return block ROW of values [16, n] times strengths b. source: given, own and stride of `convolved`."""
    i = ROW * 16 + tl.arange(0, 16)[:, None]
    inside = inside & (i < rows)
    v = convolved(source[0], source[1], conv, before + i, past, channel, inside, CHANNELS, TAPS, source[2], False)
    return tl.where(inside, v * b[:, None], 0.0).to(dtype)


@jit
def _rates(
    raw,
    strength,
    faded,
    strides,
    factors,
    total,
    rows,
    ROW: tl.constexpr,
    H: tl.constexpr,
    BOUNDED: tl.constexpr,
    DOUBLED: tl.constexpr,
):
    """Return c and b [16] of block ROW of a chunk, and the sum of g to its end; write c. total: the sum before it."""
    i = ROW * 16 + tl.arange(0, 16)
    live = i < rows
    shift, speed, lowest = factors
    x = tl.load(raw + i * strides[0], mask=live, other=0.0).to(tl.float32) + shift
    g = tl.where(live, log_decay(x, speed, lowest, BOUNDED), 0.0)
    c = total + tl.cumsum(g, 0)
    tl.store(faded + i * H, c, mask=live)
    b = tl.sigmoid(tl.load(strength + i * strides[1], mask=live, other=0.0).to(tl.float32))
    return c, tl.where(live, b * (2.0 if DOUBLED else 1.0), 0.0), total + tl.sum(g, 0)


@jit
def solve_kernel(
    qkv,
    decay,
    strength,
    conv,
    rate,
    shift,
    counts,
    chunks,
    query_start,
    seq_lens,
    slots,
    columns,
    units,
    u,
    w,
    faded,
    qkv_stride,
    decay_stride,
    strength_stride,
    columns_stride,
    lowest,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    TAPS: tl.constexpr,
    BOUNDED: tl.constexpr,
    DOUBLED: tl.constexpr,
    PART: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Make c, U and W of the chunks of a head. Grid (H, programs), of one warp.

    faded      [T, H] c;  u  [T, H, DV] and w  [T, H, DK]: a row for each row of a chunk
    PART       numbers of U and W at a time;  PRODUCTS  precision of products of float32 numbers
    """
    CHANNELS: tl.constexpr = 2 * G * DK + H * DV
    dtype: tl.constexpr = u.dtype.element_ty
    head = tl.program_id(0)
    key, part = tl.arange(0, DKP), tl.arange(0, PART)
    factors = tl.load(shift + head), tl.exp(tl.load(rate + head)), lowest
    for n in range(tl.program_id(1), tl.load(counts), tl.num_programs(1)):
        row, rows = tl.load(chunks + 4 * n).to(tl.int64), tl.load(chunks + 4 * n + 1)
        s, before = tl.load(chunks + 4 * n + 2), tl.load(chunks + 4 * n + 3)
        first = tl.load(query_start + s)
        past = tl.load(seq_lens + s) - (tl.load(query_start + s + 1) - first)
        own = columns + tl.load(slots + s).to(tl.int64) * columns_stride
        source = qkv + first.to(tl.int64) * qkv_stride, own, qkv_stride
        raw, strong, sums = (
            decay + row * decay_stride + head,
            strength + row * strength_stride + head,
            faded + row * H + head,
        )
        strides = decay_stride, strength_stride
        c0, b0, total = _rates(raw, strong, sums, strides, factors, 0.0, rows, 0, H, BOUNDED, DOUBLED)
        c1, b1, total = _rates(raw, strong, sums, strides, factors, total, rows, 1, H, BOUNDED, DOUBLED)
        c2, b2, total = _rates(raw, strong, sums, strides, factors, total, rows, 2, H, BOUNDED, DOUBLED)
        c3, b3, total = _rates(raw, strong, sums, strides, factors, total, rows, 3, H, BOUNDED, DOUBLED)
        c, b = (c0, c1, c2, c3), (b0, b1, b2, b3)
        keys = units + row * (2 * G * DK) + (G + head // (H // G)) * DK
        t = _inverses(keys, key, c, b, rows, 2 * G * DK, DK, PRODUCTS)
        t = _narrow(t, dtype)
        for start in range(0, DK, PART):
            inside = (start + part < DK)[None, :]
            place = keys + start + part[None, :]
            x0 = _weighted(place, b0 * tl.exp(c0), rows, 2 * G * DK, inside, 0)
            x1 = _weighted(place, b1 * tl.exp(c1), rows, 2 * G * DK, inside, 1)
            x2 = _weighted(place, b2 * tl.exp(c2), rows, 2 * G * DK, inside, 2)
            x3 = _weighted(place, b3 * tl.exp(c3), rows, 2 * G * DK, inside, 3)
            target = w + row * (H * DK) + head * DK + start + part[None, :]
            _store_products(t, (x0, x1, x2, x3), target, rows, H * DK, inside, PRODUCTS)
        for start in range(0, DV, PART):
            inside = (start + part < DV)[None, :]
            channel = 2 * G * DK + head * DV + start + part[None, :]
            x0 = _values(source, conv, before, past, channel, b0, rows, inside, 0, CHANNELS, TAPS, dtype)
            x1 = _values(source, conv, before, past, channel, b1, rows, inside, 1, CHANNELS, TAPS, dtype)
            x2 = _values(source, conv, before, past, channel, b2, rows, inside, 2, CHANNELS, TAPS, dtype)
            x3 = _values(source, conv, before, past, channel, b3, rows, inside, 3, CHANNELS, TAPS, dtype)
            target = u + row * (H * DV) + head * DV + start + part[None, :]
            _store_products(t, (x0, x1, x2, x3), target, rows, H * DV, inside, PRODUCTS)
