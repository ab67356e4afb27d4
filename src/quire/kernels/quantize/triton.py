"""Quantization of activations on NVIDIA GPUs, alone or fused with the RMS norm or the gate before it.

Floor: x read once, 1 byte per number and the scales written once. 8192 x 4096 in bfloat16 is 101 MB, 23 us at 4.3 TB/s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.activation.triton import silu
from quire.kernels.triton_runtime import jit, tl

GROUP = 128  # columns of a row that share a scale with the rule "group"
TOKEN, FIXED = 0, -1  # of the kernels' constexpr RULE, besides GROUP: a scale per row; one given scale
PART = 2048  # columns of a program, where columns are independent
ALIGN = 4  # the scales of a group of columns have room for a multiple of so many rows (16 bytes, for cuBLASLt)


def quantize(
    x: Tensor, rule: int, dtype: torch.dtype = torch.float8_e4m3fn, *, scale: Tensor | None = None,
    norm: Tensor | None = None, eps: float = 0.0, gated: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Quantize the rows of x [T, K], a multiple of 128 columns; returns q [T, K] and float32 scales.

    rule    GROUP: scales [K / 128, T]; TOKEN: scales [1, T]; FIXED: `scale`, which is returned. Rows are contiguous,
            and each starts at a multiple of 16 bytes
    dtype   float8_e4m3fn or int8
    norm    [K] weight of an RMS norm of x with this `eps`, which is rounded to x's dtype before
    gated   x is [T, 2K]: silu(first half) * second half, rounded to x's dtype, is quantized
    """
    rows, width = x.shape[0], x.shape[1] >> gated
    if x.stride(1) != 1:
        x = x.contiguous()
    room = -(-rows // ALIGN) * ALIGN
    q = torch.empty((room, width), dtype=dtype, device=x.device)[:rows]
    if scale is None:
        scales = torch.empty((width // GROUP if rule == GROUP else 1, room), dtype=torch.float32, device=x.device)
    else:
        scales = scale
    whole = rule == TOKEN or norm is not None
    block = 1 << (width - 1).bit_length() if whole else min(PART, 1 << (width - 1).bit_length())
    in_pdl = pdl.in_use()
    if rows:
        _quantize_kernel[(rows, -(-width // block))](
            x, norm, q, scales, x.stride(0), room, eps, width, block, rule, gated,
            448 if dtype == torch.float8_e4m3fn else 127, in_pdl, num_warps=max(1, min(16, block // 512)),
            **pdl.options(in_pdl))
    return q, scales[:, :rows] if scale is None else scale


@jit
def to_eight_bits(x, scale, MOST: tl.constexpr):
    """x / scale in 8 bits: e4m3 if MOST is 448, else int8, rounded half to even. x, scale: float32."""
    quotient = tl.div_rn(x, scale)
    if MOST == 448:
        narrow = tl.minimum(tl.maximum(quotient, -448.0), 448.0).to(tl.float8e4nv, fp_downcast_rounding="rtne")
    else:
        magic: tl.constexpr = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to an integer, half to even
        narrow = tl.minimum(tl.maximum(quotient + magic - magic, -127.0), 127.0).to(tl.int8)
    return narrow


@jit
def scale_of(amax, MOST: tl.constexpr):
    """The scale of numbers whose largest magnitude is `amax`; rows of zeros get a small positive scale."""
    return tl.div_rn(tl.maximum(amax, 1e-10), MOST * 1.0)


@jit
def _quantize_kernel(
    x, norm, q, scales, stride, stride_s, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RULE: tl.constexpr,
    GATED: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Quantize BLOCK columns of a row. Grid (rows, ceil(WIDTH / BLOCK)), with one block where a row has one result.

    x                   [rows, WIDTH] bf16 or f16, if GATED [rows, 2 WIDTH];  stride  elements from row to row
    norm, eps           [WIDTH] weight of an RMS norm before, or None; added to the mean square
    q                   [rows, WIDTH] contiguous, output
    scales              [WIDTH / 128 or 1, rows] float32, output; stride_s  elements from group to group.
                        With RULE FIXED: one number, input
    RULE                128: a scale per 128 columns; 0: per row; -1: given
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
    if GATED:
        values = silu(values) * tl.load(x + row * stride + WIDTH + col, mask=inside, other=0.0).to(tl.float32)
        values = values.to(given.dtype).to(tl.float32)
    if norm is not None:
        values *= tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
        values = (values * factor).to(given.dtype).to(tl.float32)
    if RULE > 0:
        parts = tl.reshape(values, [BLOCK // RULE, RULE])
        own = scale_of(tl.max(tl.abs(parts), 1), MOST)
        group = tl.program_id(1) * (BLOCK // RULE) + tl.arange(0, BLOCK // RULE)
        tl.store(scales + group * stride_s + row, own, mask=group < WIDTH // RULE)
        narrow = tl.reshape(to_eight_bits(parts, own[:, None], MOST), [BLOCK])
    elif RULE == 0:
        own = scale_of(tl.max(tl.abs(values), 0), MOST)
        tl.store(scales + row, own)
        narrow = to_eight_bits(values, own, MOST)
    else:
        narrow = to_eight_bits(values, tl.load(scales), MOST)
    tl.store(q + row * WIDTH + col, narrow, mask=inside)
