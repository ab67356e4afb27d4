"""The triangular systems of chunks of prompts of the gated delta rule, in blocks of 16 rows.

See `quire.kernels.delta.triton_prompts` for the formulas. A is strictly lower, T = (I + A)^-1. Blocks of 16 rows come
from the inverses of smaller ones: with D the inverse of the diagonal blocks of n rows, and L those parts of A that lie
inside blocks of 2 n rows and outside of those of n, D - D L D is the inverse of the blocks of 2 n rows. The blocks of
16 rows follow each other by substitution. Powers of A would be shorter, but lose all digits when keys are alike.

A program is one warp: its products are those of a warp, whose operands go through registers, and no warp waits for
another. With warpgroups Triton 3.6 made wrong addresses of their operands in the loop of D.
"""

from __future__ import annotations

from quire.kernels.delta.triton_rows import log_decay
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
def _rows_of(keys, key, rows, stride, ROW: tl.constexpr, DK: tl.constexpr):
    """Return block ROW of keys, [16, numbers]. keys: the chunk's first row; stride: from row to row."""
    row = ROW * 16 + tl.arange(0, 16)[:, None]
    return tl.load(keys + row * stride + key[None, :], mask=(row < rows) & (key < DK)[None, :], other=0.0)


@jit
def _squares(keys, rows, stride, DK: tl.constexpr, DKP: tl.constexpr, PART: tl.constexpr, PRODUCTS: tl.constexpr):
    """Return the blocks [16, 16] of K K^T on the diagonal and below, row by row."""
    x00 = tl.zeros([16, 16], tl.float32)
    x10, x11, x20, x21, x22, x30, x31, x32, x33 = x00, x00, x00, x00, x00, x00, x00, x00, x00
    for start in range(0, DKP, PART):
        key = start + tl.arange(0, PART)
        k0, k1 = _rows_of(keys, key, rows, stride, 0, DK), _rows_of(keys, key, rows, stride, 1, DK)
        k2, k3 = _rows_of(keys, key, rows, stride, 2, DK), _rows_of(keys, key, rows, stride, 3, DK)
        x00 = tl.dot(k0, tl.trans(k0), x00, input_precision=PRODUCTS)
        x10 = tl.dot(k1, tl.trans(k0), x10, input_precision=PRODUCTS)
        x11 = tl.dot(k1, tl.trans(k1), x11, input_precision=PRODUCTS)
        x20 = tl.dot(k2, tl.trans(k0), x20, input_precision=PRODUCTS)
        x21 = tl.dot(k2, tl.trans(k1), x21, input_precision=PRODUCTS)
        x22 = tl.dot(k2, tl.trans(k2), x22, input_precision=PRODUCTS)
        x30 = tl.dot(k3, tl.trans(k0), x30, input_precision=PRODUCTS)
        x31 = tl.dot(k3, tl.trans(k1), x31, input_precision=PRODUCTS)
        x32 = tl.dot(k3, tl.trans(k2), x32, input_precision=PRODUCTS)
        x33 = tl.dot(k3, tl.trans(k3), x33, input_precision=PRODUCTS)
    return x00, x10, x11, x20, x21, x22, x30, x31, x32, x33


@jit
def _faded(x, c, b, ROW: tl.constexpr, COLUMN: tl.constexpr):
    """Return a block of A from one of K K^T. c, b: tuples by block of rows, sums of g and strengths."""
    a = x * b[ROW][:, None] * tl.exp(tl.minimum(c[ROW][:, None] - c[COLUMN][None, :], 0.0))
    if ROW == COLUMN:
        a = tl.where(tl.arange(0, 16)[:, None] > tl.arange(0, 16)[None, :], a, 0.0)
    return a


@jit
def _solved(a, b, PRODUCTS: tl.constexpr):
    """Return -a b."""
    return -tl.dot(a, b, input_precision=PRODUCTS)


@jit
def inverses(a, PRODUCTS: tl.constexpr):
    """Return the blocks [16, 16] of T of a chunk, row by row. a: those of A.

    A block below the diagonal is -T_ii (sum over k from j to i - 1 of A_ik T_kj).
    """
    a00, a10, a11, a20, a21, a22, a30, a31, a32, a33 = a
    t00, t11, t22, t33 = (
        _inverse(a00, PRODUCTS),
        _inverse(a11, PRODUCTS),
        _inverse(a22, PRODUCTS),
        _inverse(a33, PRODUCTS),
    )
    t10 = _solved(t11, tl.dot(a10, t00, input_precision=PRODUCTS), PRODUCTS)
    part = tl.dot(a20, t00, input_precision=PRODUCTS)
    t20 = _solved(t22, tl.dot(a21, t10, part, input_precision=PRODUCTS), PRODUCTS)
    t21 = _solved(t22, tl.dot(a21, t11, input_precision=PRODUCTS), PRODUCTS)
    part = tl.dot(a31, t10, tl.dot(a30, t00, input_precision=PRODUCTS), input_precision=PRODUCTS)
    t30 = _solved(t33, tl.dot(a32, t20, part, input_precision=PRODUCTS), PRODUCTS)
    part = tl.dot(a31, t11, input_precision=PRODUCTS)
    t31 = _solved(t33, tl.dot(a32, t21, part, input_precision=PRODUCTS), PRODUCTS)
    t32 = _solved(t33, tl.dot(a32, t22, input_precision=PRODUCTS), PRODUCTS)
    return t00, t10, t11, t20, t21, t22, t30, t31, t32, t33


@jit
def strengths(strength, stride, rows, ROW: tl.constexpr, DOUBLED: tl.constexpr):
    """Return b [16] of block ROW of a chunk. strength: its first row; stride: from row to row."""
    i = ROW * 16 + tl.arange(0, 16)
    b = tl.sigmoid(tl.load(strength + i * stride, mask=i < rows, other=0.0).to(tl.float32))
    return tl.where(i < rows, b * (2.0 if DOUBLED else 1.0), 0.0)


@jit
def _sums(raw, faded, stride, factors, total, rows, ROW: tl.constexpr, H: tl.constexpr, BOUNDED: tl.constexpr):
    """Return c [16] of block ROW of a chunk, and the sum of g to its end; write c. total: the sum before it."""
    i = ROW * 16 + tl.arange(0, 16)
    live = i < rows
    shift, speed, lowest = factors
    x = tl.load(raw + i * stride, mask=live, other=0.0).to(tl.float32) + shift
    g = tl.where(live, log_decay(x, speed, lowest, BOUNDED), 0.0)
    c = total + tl.cumsum(g, 0)
    tl.store(faded + i * H, c, mask=live)
    return c, total + tl.sum(g, 0)


@jit
def _store(t, place, b, rows, stride, ROW: tl.constexpr, COLUMN: tl.constexpr):
    """Write a block of T times the strengths of its columns. place: T of the chunk; stride: from row to row."""
    row, column = ROW * 16 + tl.arange(0, 16)[:, None], COLUMN * 16 + tl.arange(0, 16)[None, :]
    y = t * b[COLUMN][None, :]
    tl.store(place + row * stride + column, y.to(place.dtype.element_ty), mask=row < rows)


@jit
def store_inverses(t, place, b, rows, stride):
    """Write the blocks of T times the strengths of its columns. b: tuple by block of rows. See `_store`."""
    _store(t[0], place, b, rows, stride, 0, 0)
    _store(t[1], place, b, rows, stride, 1, 0)
    _store(t[2], place, b, rows, stride, 1, 1)
    _store(t[3], place, b, rows, stride, 2, 0)
    _store(t[4], place, b, rows, stride, 2, 1)
    _store(t[5], place, b, rows, stride, 2, 2)
    _store(t[6], place, b, rows, stride, 3, 0)
    _store(t[7], place, b, rows, stride, 3, 1)
    _store(t[8], place, b, rows, stride, 3, 2)
    _store(t[9], place, b, rows, stride, 3, 3)


@jit
def solve_kernel(
    decay,
    strength,
    rate,
    shift,
    counts,
    chunks,
    units,
    solved,
    faded,
    decay_stride,
    strength_stride,
    lowest,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DKP: tl.constexpr,
    BOUNDED: tl.constexpr,
    DOUBLED: tl.constexpr,
    PART: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Make c, and T with the strengths of its columns, of the chunks of a head. Grid (H, programs), of one warp.

    faded      [T, H] c;  solved  [T, H, 64]: a row for each row of a chunk; numbers right of the diagonal's blocks of
               16 are not written
    PART       numbers of keys at a time;  PRODUCTS  precision of products of float32 numbers
    """
    head = tl.program_id(0)
    factors = (tl.load(shift + head), tl.exp(tl.load(rate + head)), lowest)
    stride: tl.constexpr = 64 * H
    for n in range(tl.program_id(1), tl.load(counts), tl.num_programs(1)):
        row, rows = tl.load(chunks + 4 * n).to(tl.int64), tl.load(chunks + 4 * n + 1)
        raw, strong, sums = decay + row * decay_stride + head, strength + row * strength_stride + head, faded + row * H
        sums += head
        c0, total = _sums(raw, sums, decay_stride, factors, 0.0, rows, 0, H, BOUNDED)
        c1, total = _sums(raw, sums, decay_stride, factors, total, rows, 1, H, BOUNDED)
        c2, total = _sums(raw, sums, decay_stride, factors, total, rows, 2, H, BOUNDED)
        c3, total = _sums(raw, sums, decay_stride, factors, total, rows, 3, H, BOUNDED)
        b0 = strengths(strong, strength_stride, rows, 0, DOUBLED)
        b1 = strengths(strong, strength_stride, rows, 1, DOUBLED)
        b2 = strengths(strong, strength_stride, rows, 2, DOUBLED)
        b3 = strengths(strong, strength_stride, rows, 3, DOUBLED)
        c, b = (c0, c1, c2, c3), (b0, b1, b2, b3)
        keys = units + row * (2 * G * DK) + (G + head // (H // G)) * DK
        x = _squares(keys, rows, 2 * G * DK, DK, DKP, PART, PRODUCTS)
        a00, a11 = _faded(x[0], c, b, 0, 0), _faded(x[2], c, b, 1, 1)
        a22, a33 = _faded(x[5], c, b, 2, 2), _faded(x[9], c, b, 3, 3)
        a10, a20, a21 = _faded(x[1], c, b, 1, 0), _faded(x[3], c, b, 2, 0), _faded(x[4], c, b, 2, 1)
        a30, a31, a32 = _faded(x[6], c, b, 3, 0), _faded(x[7], c, b, 3, 1), _faded(x[8], c, b, 3, 2)
        t = inverses((a00, a10, a11, a20, a21, a22, a30, a31, a32, a33), PRODUCTS)
        store_inverses(t, solved + row * stride + head * 64, b, rows, stride)
