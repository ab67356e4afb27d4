"""Chunks of prompts of the gated delta rule whose decays differ by channel: sums of decays, products of rows.

With c [rows, Dk] the sum of g from the chunk's first row, products of rows j <= i are

    KK_ij = sum of k_i k_j exp(c_i - c_j) over channels;    QK_ij = sum of q_i k_j exp(c_i - c_j) over channels

A product of matrices needs a row n between j and i: (k_i exp(c_i - c_n)) . (k_j exp(c_n - c_j)), whose exponents are
not above 0. Rows are halved as in a binary tree: first i is in the second half of the chunk, j in the first, and n is
the last row of the first half; then each half is halved, down to single rows. At each of the six levels 32 rows are an
i of one product and 32 a j, so a level needs one exponential for each row and channel.

`fade_kernel` makes c, and the queries and keys that meet the state: q exp(c), k exp(c) and k exp(c_m - c), m the last
row. `products_kernel` makes KK and QK, `solve_channels_kernel` makes T. `quire.kernels.delta.triton_prompts` has all
other steps.

Formulas: Kimi Linear (arXiv 2510.26692), section 3, with the halves in place of sub-chunks.
"""

from __future__ import annotations

from quire.kernels.delta.triton_rows import log_decay
from quire.kernels.delta.triton_solve import inverses, store_inverses, strengths
from quire.kernels.triton_runtime import jit, tl


@jit
def fade_kernel(
    decay,
    rate,
    shift,
    counts,
    chunks,
    units,
    faded,
    decayed,
    seen,
    decay_stride,
    lowest,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DKP: tl.constexpr,
    BOUNDED: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
):
    """Make c, and queries and keys with decays, of the chunks of a head. Grid (H, programs), of one warp.

    units    [T, 2, G, DK] q and k;  faded  [T, H, DK] c, float32
    decayed  [T, 3, H, DK] q exp(c), k exp(c), k exp(c_m - c)
    seen     [T, H, 64] QK; its diagonal is written
    PART     channels at a time
    """
    head, flat = tl.program_id(0), tl.arange(0, CHUNK)
    i, speed = flat[:, None], tl.exp(tl.load(rate + head))
    for n in range(tl.program_id(1), tl.load(counts), tl.num_programs(1)):
        row, rows = tl.load(chunks + 4 * n).to(tl.int64), tl.load(chunks + 4 * n + 1)
        own = tl.zeros([CHUNK], tl.float32)
        for start in range(0, DKP, PART):
            key = start + tl.arange(0, PART)[None, :]
            live, in_key = (i < rows) & (key < DK), key < DK
            raw = tl.load(decay + row * decay_stride + (i * decay_stride + head * DK + key), mask=live, other=0.0)
            raw = raw.to(tl.float32) + tl.load(shift + head * DK + key, mask=in_key, other=0.0)
            sums = faded + row * (H * DK) + head * DK + key
            tl.store(
                sums + i * (H * DK), tl.cumsum(tl.where(live, log_decay(raw, speed, lowest, BOUNDED), 0.0), 0), live
            )
            tl.debug_barrier()  # c is read again: Triton makes it twice where it is needed in two layouts
            c = tl.load(sums + i * (H * DK), mask=live, other=0.0)
            last = tl.load(sums + (rows - 1) * (H * DK), mask=in_key, other=0.0)
            unit_at = units + row * (2 * G * DK) + ((i * (2 * G) + head // (H // G)) * DK + key)
            q = tl.load(unit_at, mask=live, other=0.0).to(tl.float32)
            k = tl.load(unit_at + G * DK, mask=live, other=0.0).to(tl.float32)
            own += tl.sum(q * k, 1)
            at, since = decayed + row * (3 * H * DK) + ((i * (3 * H) + head) * DK + key), tl.exp(c)
            tl.store(at, (q * since).to(decayed.dtype.element_ty), mask=live)
            tl.store(at + H * DK, (k * since).to(decayed.dtype.element_ty), mask=live)
            after = tl.exp(tl.minimum(last - c, 0.0))
            tl.store(at + 2 * H * DK, (k * after).to(decayed.dtype.element_ty), mask=live)
        own_at = seen + row * (H * CHUNK) + ((flat * H + head) * CHUNK + flat)
        tl.store(own_at, own.to(seen.dtype.element_ty), mask=flat < rows)


@jit
def products_kernel(
    counts,
    chunks,
    units,
    faded,
    products,
    seen,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DKP: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Make KK and QK below the diagonal, of the chunks of a head. Grid (H, programs, levels), of one warp.

    products   [T, H, 64] KK, float32;  seen  [T, H, 64] QK. Other numbers are not written
    A level l is that of products of the halves of 2^(l + 1) rows. For the other parameters see `fade_kernel`.
    """
    head, level = tl.program_id(0), tl.program_id(2)
    own = tl.arange(0, CHUNK // 2)
    earlier = (own >> level << (level + 1)) + (own & ((1 << level) - 1))
    later, middle = earlier + (1 << level), (own >> level << (level + 1)) + ((1 << level) - 1)
    j, i, m = earlier[:, None], later[:, None], middle[:, None]
    alike = (own >> level)[:, None] == (own >> level)[None, :]
    for n in range(tl.program_id(1), tl.load(counts), tl.num_programs(1)):
        row, rows = tl.load(chunks + 4 * n).to(tl.int64), tl.load(chunks + 4 * n + 1)
        queries, sums = units + row * (2 * G * DK) + head // (H // G) * DK, faded + row * (H * DK) + head * DK
        kk, qk = tl.zeros([CHUNK // 2, CHUNK // 2], tl.float32), tl.zeros([CHUNK // 2, CHUNK // 2], tl.float32)
        for start in range(0, DKP, PART):
            key = start + tl.arange(0, PART)[None, :]
            live = (i < rows) & (key < DK)  # a row m that is not there has no row i
            begin = tl.load(sums + (m * (H * DK) + key), mask=(m < rows) & (key < DK), other=0.0)
            c = tl.load(sums + (i * (H * DK) + key), mask=live, other=0.0)
            q = tl.load(queries + (i * (2 * G * DK) + key), mask=live, other=0.0)
            k = tl.load(queries + G * DK + (i * (2 * G * DK) + key), mask=live, other=0.0)
            since = tl.exp(-tl.abs(c - begin))
            c = tl.load(sums + (j * (H * DK) + key), mask=(j < rows) & (key < DK), other=0.0)
            right = tl.load(queries + G * DK + (j * (2 * G * DK) + key), mask=(j < rows) & (key < DK), other=0.0)
            right = tl.trans((right * tl.exp(-tl.abs(begin - c))).to(k.dtype))
            kk = tl.dot((k * since).to(k.dtype), right, kk, input_precision=PRODUCTS)
            qk = tl.dot((q * since).to(k.dtype), right, qk, input_precision=PRODUCTS)
        at = (i * H + head) * CHUNK + earlier[None, :]
        tl.store(products + row * (H * CHUNK) + at, kk, mask=alike & (i < rows))
        tl.store(seen + row * (H * CHUNK) + at, qk.to(seen.dtype.element_ty), mask=alike & (i < rows))


@jit
def _block(products, rows, stride, b, ROW: tl.constexpr, COLUMN: tl.constexpr):
    """Return a block of A. products: KK of the chunk; stride: from row to row; b: strengths by block of rows."""
    i, j = ROW * 16 + tl.arange(0, 16)[:, None], COLUMN * 16 + tl.arange(0, 16)[None, :]
    kk = tl.load(products + i * stride + j, mask=(i < rows) & (i > j), other=0.0)
    return kk * b[ROW][:, None]


@jit
def solve_channels_kernel(
    strength,
    counts,
    chunks,
    products,
    solved,
    strength_stride,
    H: tl.constexpr,
    DOUBLED: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Make T with the strengths of its columns, of the chunks of a head. Grid (H, programs), of one warp.

    For the parameters see `products_kernel` and `solve_kernel`.
    """
    head, stride = tl.program_id(0), 64 * H
    for n in range(tl.program_id(1), tl.load(counts), tl.num_programs(1)):
        row, rows = tl.load(chunks + 4 * n).to(tl.int64), tl.load(chunks + 4 * n + 1)
        strong, place = strength + row * strength_stride + head, products + row * stride + head * 64
        b0 = strengths(strong, strength_stride, rows, 0, DOUBLED)
        b1 = strengths(strong, strength_stride, rows, 1, DOUBLED)
        b2 = strengths(strong, strength_stride, rows, 2, DOUBLED)
        b3 = strengths(strong, strength_stride, rows, 3, DOUBLED)
        b = b0, b1, b2, b3
        a00, a10 = _block(place, rows, stride, b, 0, 0), _block(place, rows, stride, b, 1, 0)
        a11, a20 = _block(place, rows, stride, b, 1, 1), _block(place, rows, stride, b, 2, 0)
        a21, a22 = _block(place, rows, stride, b, 2, 1), _block(place, rows, stride, b, 2, 2)
        a30, a31 = _block(place, rows, stride, b, 3, 0), _block(place, rows, stride, b, 3, 1)
        a32, a33 = _block(place, rows, stride, b, 3, 2), _block(place, rows, stride, b, 3, 3)
        t = inverses((a00, a10, a11, a20, a21, a22, a30, a31, a32, a33), PRODUCTS)
        store_inverses(t, solved + row * stride + head * 64, b, rows, stride)


@jit
def finish_copy(
    sources,
    place,
    row,
    rows,
    head,
    value,
    key,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHUNK: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Take a head's matrix at `place`, of values `value`, through the first `rows` rows of the chunk at `row`.

    sources   units of the head's keys, x and faded;  key  arange of the padded size. Values are the rows of the product
    """
    keys, x, faded, stride = sources
    flat = tl.arange(0, CHUNK)
    live, in_key, in_value = flat < rows, key < DK, value < DV
    keyed, shown = live[:, None] & in_key[None, :], in_value[:, None] & live[None, :]
    k = tl.load(keys + row * stride + (flat[:, None] * stride + key[None, :]), mask=keyed, other=0.0)
    c_at = faded + row * (H * DK) + ((flat[:, None] * H + head) * DK + key[None, :])
    c = tl.load(c_at, mask=keyed, other=0.0)
    then = tl.load(faded + (row + rows - 1) * (H * DK) + (head * DK + key), mask=in_key, other=0.0)
    later = (k.to(tl.float32) * tl.exp(tl.minimum(then[None, :] - c, 0.0))).to(k.dtype)
    x_at = x + row * (H * DV) + ((flat[None, :] * H + head) * DV + value[:, None])
    part = tl.load(x_at, mask=shown, other=0.0)
    at, inside = place + (key[None, :] * DV + value[:, None]), in_value[:, None] & in_key[None, :]
    held = tl.exp(then)[None, :] * tl.load(at, mask=inside, other=0.0).to(tl.float32)
    held = tl.dot(part, later, held, input_precision=PRODUCTS)
    tl.store(at, held.to(place.dtype.element_ty), mask=inside)
