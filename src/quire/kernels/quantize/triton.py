"""Quantization of activations on NVIDIA GPUs, alone or fused with the RMS norm before it.

Floor: x read once, 1 byte per number and the scales written once. 8192 x 4096 in bfloat16 is 101 MB, 23 us at 4.3 TB/s.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.scheme import GROUP, Wire
from quire.kernels import pdl
from quire.kernels.quantize.rows import QuantizedRows
from quire.kernels.triton_runtime import jit, tl

TOKEN, FIXED = 0, -1  # of the kernels' constexpr RULE, besides GROUP: a scale per row; one given scale
PART = 2048  # columns of a program, where columns are independent
ALIGN = 4  # the scales of a group of columns have room for a multiple of so many rows (16 bytes, for cuBLASLt)


def quantize(
    x: Tensor,
    rule: int,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    scale: Tensor | None = None,
    powers: bool = False,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Quantize the rows of x [T, K], K a multiple of 128. Return the quantized rows q [R, K] and float32 scales.

    R is T, rounded up to a multiple of 4; rows from T on are not written.

    rule    GROUP: a scale for every 128 columns of a row, [K / 128, R]; TOKEN: a scale for each row, [1, R]; FIXED: the
            given `scale` for all numbers, returned as it is
    dtype   dtype of q: float8_e4m3fn or int8
    powers  True: scales are rounded up to powers of two
    norm    [K] weight of an RMS norm, which is applied to x before, with `eps`, and rounded to x's dtype; None: no norm
    """
    rows, width = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    room = -(-rows // ALIGN) * ALIGN
    q = torch.empty((room, width), dtype=dtype, device=x.device)
    if scale is None:
        scales = torch.empty((width // GROUP if rule == GROUP else 1, room), dtype=torch.float32, device=x.device)
    else:
        scales = scale
    whole = rule == TOKEN or norm is not None
    block = 1 << (width - 1).bit_length() if whole else min(PART, 1 << (width - 1).bit_length())
    in_pdl = pdl.in_use()
    if rows:
        _quantize_kernel[(rows, -(-width // block))](
            x,
            norm,
            q,
            scales,
            x.stride(0),
            room,
            eps,
            width,
            block,
            rule,
            powers,
            448 if dtype == torch.float8_e4m3fn else 127,
            in_pdl,
            num_warps=max(1, min(16, block // 512)),
            **pdl.options(in_pdl),
        )
    return q, scales


def quantize_rows(x: Tensor, wire: Wire) -> QuantizedRows:
    """Quantize x [T, K] to the form of a wire. See `quire.kernels.quantize`."""
    dtype = torch.int8 if wire.values == "int8" else torch.float8_e4m3fn
    given = F.pad(x, (0, -x.shape[1] % GROUP)) if x.shape[1] % GROUP else x
    q, scales = quantize(given, wire.group or TOKEN, dtype, powers=wire.powers)
    return QuantizedRows(q[: len(x), : x.shape[1]].contiguous(), scales[:, : len(x)].t(), x.dtype)


@jit
def tile_scales(
    scales, first, n, start, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Load the scales of BLOCK_K weights, from input `start` on, of BLOCK_N outputs, from `first` on.

    Blocks: for each 16 inputs, [J, 1, BLOCK_K / 16] if all outputs have the same, else [J, BLOCK_N, BLOCK_K / 16].
    Other weights (BLOCK 0): [J, BLOCK_N, 1].
    scales   a pointer, or [J, 1, 1], to [n / BLOCK, K / 128] float32, or to [n]
    """
    col = first if BLOCK and BLOCK % BLOCK_N == 0 else first + tl.arange(0, BLOCK_N)[None, :, None]
    col = tl.minimum(col, n - 1)
    if BLOCK:
        group = start // 128 + tl.arange(0, BLOCK_K // 16)[None, None, :] // 8
        scale = tl.load(scales + col // BLOCK * (K // 128) + group, mask=group < K // 128, other=0.0)
    else:
        scale = tl.load(scales + col)
    return scale


@jit
def to_eight_bits(x, scale, MOST: tl.constexpr):
    """Return x / scale in 8 bits, rounded half to even: e4m3 if MOST is 448, else int8. x, scale: float32.

    NaN stays NaN in e4m3, and is any number in int8, which has none.
    """
    inverse = tl.div_rn(1.0, scale)
    quotient = x * inverse  # and the error of it, which rounds it as a division does (Markstein, 1990)
    quotient = tl.fma(tl.fma(-quotient, scale, x), inverse, quotient)
    if MOST == 448:
        inside = tl.clamp(quotient, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        narrow = inside.to(tl.float8e4nv, fp_downcast_rounding="rtne")
    else:
        magic: tl.constexpr = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to an integer, half to even
        narrow = tl.clamp(quotient + magic - magic, -128.0, 127.0, propagate_nan=tl.PropagateNan.ALL).to(tl.int8)
    return narrow


@jit
def four_floats(words, MOST: tl.constexpr):
    """Return the four 8-bit numbers of each int32 word as float32, the lowest byte first.

    The numbers are e4m3 if MOST is 448, else int8. Packed in words, they take a quarter of the registers and of the
    instructions.
    """
    if MOST == 448:
        a, b, c, d = tl.inline_asm_elementwise(
            """{ .reg .b16 lo, hi, a, b, c, d; .reg .b32 low, high;
            mov.b32 {lo, hi}, $4; cvt.rn.f16x2.e4m3x2 low, lo; cvt.rn.f16x2.e4m3x2 high, hi;
            mov.b32 {a, b}, low; mov.b32 {c, d}, high;
            cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }""",
            "=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:  # 2^23 + 128 + q, whose low byte is q with its sign turned
        a, b, c, d = tl.inline_asm_elementwise(
            """{ .reg .b32 t; xor.b32 t, $4, 0x80808080;
            prmt.b32 $0, t, 0x4B000000, 0x7440; prmt.b32 $1, t, 0x4B000000, 0x7441;
            prmt.b32 $2, t, 0x4B000000, 0x7442; prmt.b32 $3, t, 0x4B000000, 0x7443; }""",
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
        a, b, c, d = a - 8388736.0, b - 8388736.0, c - 8388736.0, d - 8388736.0
    return a, b, c, d


@jit
def sums_of_16(
    tile, given, J: tl.constexpr, ROWS: tl.constexpr, DEEP: tl.constexpr, MOST: tl.constexpr, WORDS: tl.constexpr
):
    """Return the sums of every 16 neighbouring numbers of tile * given, [.., DEEP / 16]. A thread holds all 16.

    tile    weights: int32 words of four numbers [.., ROWS, DEEP / 4] if WORDS, else 8-bit numbers [.., ROWS, DEEP]
    given   [.., 1, DEEP] float32 inputs
    J, ROWS   first two sizes of the result
    """
    if WORDS:
        even, odd = tl.split(tl.reshape(given, [given.shape[0], given.shape[1], DEEP // 4, 2, 2]))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        w0, w1, w2, w3 = four_floats(tile, MOST)
        product = w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
        sums = tl.sum(tl.reshape(product, [J, ROWS, DEEP // 16, 4]), 3)
    else:
        sums = tl.sum(tl.reshape(tile.to(tl.float32) * given, [J, ROWS, DEEP // 16, 16]), 3)
    return sums


@jit
def scaled_sums(
    tile,
    given,
    scale,
    J: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Return the sums [J, BLOCK_N] over the last axis of tile * given, times the scales of blocks (`tile_scales`).

    tile   [J, BLOCK_N, BLOCK_K] weights;  given  [J, 1, BLOCK_K] inputs
    """
    part = sums_of_16(tile, given, J, BLOCK_N, BLOCK_K, MOST, WORDS)
    if BLOCK:
        part *= scale
    return tl.sum(part, 2)


@jit
def magnitude(x):
    """Return the magnitudes of float32 numbers as int32 words of the same order, in which NaN is the largest.

    Maxima of numbers leave NaN out, those of words do not.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def scale_of(largest, MOST: tl.constexpr, POWERS: tl.constexpr):
    """Return the scale amax / MOST of numbers with the largest `magnitude` amax: 1e-10 / MOST for zeros, NaN for NaN.

    POWERS   True: the scale is rounded up to a power of two
    """
    least: tl.constexpr = 0x2EDBE6FF  # 1e-10
    scale = tl.div_rn(tl.maximum(largest, least).to(tl.float32, bitcast=True), MOST * 1.0)
    if POWERS:  # add to the mantissa what carries into the exponent unless the mantissa is zero
        bits = scale.to(tl.int32, bitcast=True)
        bits = tl.where(bits < 0x7F800000, (bits + 0x7FFFFF) & 0x7F800000, bits)
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@jit
def quantized(
    values, own, RULE: tl.constexpr, POWERS: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr, DEEP: tl.constexpr
):
    """Quantize values [ROWS, 1, DEEP] float32 to 8 bits, and return them dequantized, in float32.

    own      [ROWS, 1, 1] given scales, for RULE -1 only
    RULE     128: a scale for every 128 columns; 0: a scale for each row; -1: the given scale
    POWERS   True: scales are powers of two
    MOST     largest magnitude in 8 bits: 448 (e4m3) or 127 (int8)
    """
    if RULE > 0:
        parts = tl.reshape(values, [ROWS, 1, DEEP // RULE, RULE])
        scales = scale_of(tl.max(magnitude(parts), 3, keep_dims=True), MOST, POWERS)
        given = tl.reshape(to_eight_bits(parts, scales, MOST).to(tl.float32) * scales, [ROWS, 1, DEEP])
    else:
        if RULE == 0:
            own = scale_of(tl.max(magnitude(values), 2, keep_dims=True), MOST, POWERS)
        given = to_eight_bits(values, own, MOST).to(tl.float32) * own
    return given


@jit
def _quantize_kernel(
    x,
    norm,
    q,
    scales,
    stride,
    stride_s,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RULE: tl.constexpr,
    POWERS: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantize BLOCK columns of a row. Grid (rows, ceil(WIDTH / BLOCK)), with one block where a row has one result.

    x                   [rows, WIDTH] bf16 or f16;  stride  elements from row to row
    norm, eps           [WIDTH] weight of an RMS norm before, or None; added to the mean square
    q                   [rows, WIDTH] contiguous, output
    scales              [WIDTH / 128 or 1, rows] float32, output; stride_s  elements from group to group.
                        With RULE FIXED: one number, input
    RULE, POWERS        128: a scale per 128 columns; 0: per row; -1: given. Scales are powers of two
    MOST                largest magnitude in 8 bits: 448 (e4m3) or 127 (int8)
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < WIDTH
    if norm is not None:
        factor = tl.load(norm + col, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    given = tl.load(x + row * stride + col, mask=inside, other=0.0)
    values = given.to(tl.float32)
    if norm is not None:
        values *= tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
        values = (values * factor).to(given.dtype).to(tl.float32)
    if RULE > 0:
        parts = tl.reshape(values, [BLOCK // RULE, RULE])
        own = scale_of(tl.max(magnitude(parts), 1), MOST, POWERS)
        group = tl.program_id(1) * (BLOCK // RULE) + tl.arange(0, BLOCK // RULE)
        tl.store(scales + group * stride_s + row, own, mask=group < WIDTH // RULE)
        narrow = tl.reshape(to_eight_bits(parts, own[:, None], MOST), [BLOCK])
    elif RULE == 0:
        own = scale_of(tl.max(magnitude(values), 0), MOST, POWERS)
        tl.store(scales + row, own)
        narrow = to_eight_bits(values, own, MOST)
    else:
        narrow = to_eight_bits(values, tl.load(scales), MOST)
    tl.store(q + row * WIDTH + col, narrow, mask=inside)
