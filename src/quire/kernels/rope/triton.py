"""Rows of cos and sin from positions, in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.triton_runtime import jit, tl

ROWS = 8


def rotation_rows(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and signed sin [T, D] of the rotary embedding at `positions`, as `quire.kernels.rope` takes them.

    positions     [T] int64
    frequencies   [D / 2] float32; the angle is position * frequency in float32
    scale         factor of every cosine and sine

    Sine and cosine are exact to 2 units in the last place, for any angle.
    """
    count, half = positions.shape[0], frequencies.shape[0]
    cos, sin = (torch.empty(count, 2 * half, dtype=dtype, device=positions.device) for _ in range(2))
    if count:
        in_pdl = pdl.in_use()
        _rotation_kernel[(-(-count // ROWS),)](
            positions,
            frequencies,
            cos,
            sin,
            count,
            scale,
            half,
            1 << (half - 1).bit_length(),
            ROWS,
            in_pdl,
            num_warps=4,
            **pdl.options(in_pdl),
        )
    return cos, sin


@jit(do_not_specialize=["count"])
def _rotation_kernel(
    positions,
    frequencies,
    cos,
    sin,
    count,
    scale,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of cos and sin for ROWS positions. Grid (ceil(count / ROWS),).

    positions         [count] int64;  frequencies  [HALF] float32
    cos, sin          [count, 2 HALF] contiguous; the first half of sin is negated
    scale             factor of cos and sin
    HALF, BLOCK       half a head's width; padded to a power of two
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < count) & (col < HALF)
    frequency = tl.load(frequencies + col, mask=col < HALF, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    angle = tl.load(positions + row, mask=row < count, other=0).to(tl.float32) * frequency
    c, s = tl.cos(angle) * scale, tl.sin(angle) * scale
    at = row.to(tl.int64) * (2 * HALF) + col
    tl.store(cos + at, c.to(cos.dtype.element_ty), mask=inside)
    tl.store(cos + at + HALF, c.to(cos.dtype.element_ty), mask=inside)
    tl.store(sin + at, (-s).to(sin.dtype.element_ty), mask=inside)
    tl.store(sin + at + HALF, s.to(sin.dtype.element_ty), mask=inside)
