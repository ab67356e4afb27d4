"""Products of up to 4 rows with an 8-bit weight, without tensor cores; the norm and the quantization of x are fused.

Each program quantizes its own copy of x by the rule of the format, so that no kernel runs before the product. Floor:
the bytes of the weight over 4.3 TB/s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.attention.triton_plan import multiprocessors
from quire.kernels.linear.gemv import _finish, bucket
from quire.kernels.quantize.triton import scale_of, sums_of_16, to_eight_bits
from quire.kernels.triton_runtime import INTERPRETED, jit, tl

MOST_FEW = 4  # rows
WIDEST = 16384  # inputs, which a program keeps in registers


@dataclass(frozen=True)
class Walk:
    """Outputs of a program at a time, warps, and programs of a multiprocessor."""

    block_n: int
    warps: int
    programs: int


def walk_of(rows: int, n: int, k: int, gated: bool) -> Walk:
    """Return the tiling for `rows` rows, n outputs (of gate and n of up, if gated) and k inputs."""
    return Walk(2 if gated or k > 8192 else 4, max(1, min(16, bucket(k) // 512)), 2 if k > 8192 else 3)


def product(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, y: Tensor, *, rule: int, most: int,
    powers: bool = False, given: Tensor | None = None, block: int = 0, residual: Tensor | None = None,
    norm: Tensor | None = None, eps: float = 0.0, gated: bool = False, walk: Walk | None = None,
) -> Tensor:  # fmt: skip
    """Multiply x [T, K] of at most MOST_FEW rows with weight [N, K] into y [T, N]; returns y.

    weight     8-bit numbers;  scales  [ceil(N / block), K / 128] float32, or [N] if block is 0
    rule, powers   of `quire.kernels.quantize.triton`;  most  448 or 127;  given  the scale of the rule FIXED
    residual, norm, eps, gated   as in `gemv.product`
    """
    rows, n, k = x.shape[0], weight.shape[0] >> gated, weight.shape[1]
    size = bucket(rows)
    walk = walk or walk_of(size, n, k, gated)
    in_pdl = pdl.in_use()
    blocks = -(-n // walk.block_n)
    steps = -(-blocks // (walk.programs * multiprocessors()))
    grid = -(-blocks // steps)
    _few_kernel[(grid,)](
        x, weight if INTERPRETED else weight.view(torch.int32), scales, bias, residual, norm, given, y, rows, n, x.stride(0), eps, k, size, walk.block_n,
        bucket(k), steps, block, rule, powers, most, gated, not INTERPRETED,
        in_pdl, num_warps=walk.warps, **pdl.options(in_pdl))
    return y


@jit
def _tile(weight, col, n, K: tl.constexpr, BLOCK_K: tl.constexpr, WORDS: tl.constexpr):
    """Load the weights of the outputs `col` [BLOCK_N], [1, BLOCK_N, BLOCK_K], or a quarter as many words."""
    EACH: tl.constexpr = 4 if WORDS else 1
    lane = tl.arange(0, BLOCK_K // EACH)[None, None, :]
    mask = (col < n)[None, :, None] & (lane < K // EACH)
    return tl.load(weight + col.to(tl.int64)[None, :, None] * (K // EACH) + lane, mask=mask, other=0.0,
                   eviction_policy="evict_first")


@jit
def _sum(tile, given, scales, col, n, M: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
         BLOCK: tl.constexpr, MOST: tl.constexpr, WORDS: tl.constexpr):
    """Products [M, BLOCK_N] of a tile of weights and the inputs `given`, with the weights' scales."""
    part = sums_of_16(tile, given, M, BLOCK_N, BLOCK_K, MOST, WORDS)
    if BLOCK:
        group = tl.arange(0, BLOCK_K // 16)[None, None, :] // 8
        at = tl.minimum(col, n - 1)[None, :, None] // BLOCK * (K // 128) + group
        part *= tl.load(scales + at, mask=group < K // 128, other=0.0)
    out = tl.sum(part, 2)
    if BLOCK == 0:
        out *= tl.load(scales + col, mask=col < n, other=0.0)[None, :]
    return out


@jit(do_not_specialize=["rows"])
def _few_kernel(
    x, weight, scales, bias, residual, norm, fixed, y, rows, n, stride, eps, K: tl.constexpr, M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, RULE: tl.constexpr,
    POWERS: tl.constexpr, MOST: tl.constexpr, GATED: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of up to M <= MOST_FEW rows in each of STEPS steps. Grid (ceil(n / (BLOCK_N STEPS)),).

    x                   [rows, K];  stride  elements from row to row
    weight              [n, K] e4m3 or int8 (if WORDS [n, K / 4] int32), contiguous; twice the rows if GATED, gate first
    scales              float32: [ceil(n / BLOCK), K / 128], or [n] if BLOCK is 0; twice the rows if GATED
    bias                [n], if GATED [2 n]; or None
    residual            [rows, n] contiguous, or None;  y  [rows, n] contiguous, output
    norm, eps           [K] weight of an RMS norm of x, or None; added to the mean square
    fixed               scale of x with RULE -1, one number
    M                   rows, padded to a power of two
    BLOCK_N, BLOCK_K    outputs of a step; K, padded to a power of two
    RULE, POWERS, MOST  see `quantize.triton._quantize_kernel`;  WORDS  four weights are an int32
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)[None, None, :]
    row = tl.arange(0, M)[:, None, None]
    tile = _tile(weight, col, n, K, BLOCK_K, WORDS)
    up_weight = weight + n.to(tl.int64) * (K // 4 if WORDS else K)
    up_tile = tile
    if GATED:
        up_tile = _tile(up_weight, col, n, K, BLOCK_K, WORDS)
    up_scales = scales + (n // BLOCK * (K // 128) if BLOCK else n)
    factor = tl.zeros([1, 1, BLOCK_K], tl.float32)
    if norm is not None:
        factor = tl.load(norm + lane, mask=lane < K, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    raw = tl.load(x + row * stride + lane, mask=(row < rows) & (lane < K), other=0.0)
    values = raw.to(tl.float32)
    if norm is not None:
        inverse = tl.rsqrt(tl.sum(values * values, 2, keep_dims=True) / K + eps)
        values = (values * inverse * factor).to(raw.dtype).to(tl.float32)
    if RULE > 0:
        parts = tl.reshape(values, [M, 1, BLOCK_K // 128, 128])
        own = scale_of(tl.max(tl.abs(parts), 3, keep_dims=True), MOST, POWERS)
        given = tl.reshape(to_eight_bits(parts, own, MOST).to(tl.float32) * own, [M, 1, BLOCK_K])
    else:
        if RULE == 0:
            own = scale_of(tl.max(tl.abs(values), 2, keep_dims=True), MOST, POWERS)
        else:
            own = tl.load(fixed)
        given = to_eight_bits(values, own, MOST).to(tl.float32) * own
    out_row = tl.arange(0, M)[:, None]
    for _step in range(STEPS):
        upcoming = col + tl.num_programs(0) * BLOCK_N
        now, up_now = tile, up_tile
        tile = _tile(weight, upcoming, n, K, BLOCK_K, WORDS)
        out = _sum(now, given, scales, col, n, M, K, BLOCK_N, BLOCK_K, BLOCK, MOST, WORDS)
        other = out
        if GATED:
            up_tile = _tile(up_weight, upcoming, n, K, BLOCK_K, WORDS)
            other = _sum(up_now, given, up_scales, col, n, M, K, BLOCK_N, BLOCK_K, BLOCK, MOST, WORDS)
        inside = (out_row < rows) & (col < n)[None, :]
        _finish(out, other, bias, residual, y, out_row, col[None, :], n, inside, GATED)
        col = upcoming
