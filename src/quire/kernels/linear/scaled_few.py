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
from quire.kernels.linear.epilogue import Epilogue, finish
from quire.kernels.linear.gemv import bucket
from quire.kernels.linear.scaled_weight import Scaled
from quire.kernels.quantize.triton import magnitude, quantized, scale_of, scaled_sums, tile_scales
from quire.kernels.triton_runtime import INTERPRETED, jit, tl


@dataclass(frozen=True)
class Walk:
    """The tiling of a product.

    block_n    outputs that a program computes at a time
    block_k    inputs that a program multiplies at a time
    programs   programs per multiprocessor
    """

    block_n: int
    block_k: int
    warps: int
    programs: int


def walk_of(k: int, gated: bool) -> Walk:
    """Return the tiling for k inputs. gated: the outputs are those of gate and up.

    The tiling is near the best of many, measured on an H200 for the products of Qwen3 8B (docs/log.md).
    """
    deep = bucket(k) if k <= 8192 else 4096
    return Walk(2 if gated else 4, deep, max(1, deep // 1024 if deep > 2048 else deep // 512), 4)


def product(x: Tensor, packed: Scaled, into: Epilogue, *, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Multiply x [T, K] of at most 4 rows with the weight; return `into.y`. norm, eps: as in `gemv.product`."""
    weight, (y, bias, act, residual), gated = packed.values, into, into.gated
    rows, n, k = x.shape[0], weight.shape[0] >> gated, weight.shape[1]
    size, walk = bucket(rows), walk_of(k, gated)
    if x.stride(1) != 1:
        x = x.contiguous()
    in_pdl = pdl.in_use()
    blocks = -(-n // walk.block_n)
    steps = -(-blocks // (walk.programs * multiprocessors()))
    _few_kernel[(-(-blocks // steps),)](
        x,
        weight if INTERPRETED else weight.view(torch.int32),
        packed.scales,
        bias,
        residual,
        norm,
        packed.fixed,
        y,
        rows,
        n,
        x.stride(0),
        eps,
        k,
        size,
        walk.block_n,
        walk.block_k,
        steps,
        bucket(steps),
        packed.block,
        packed.rule,
        packed.powers,
        packed.most,
        act,
        not INTERPRETED,
        in_pdl,
        num_warps=walk.warps,
        **pdl.options(in_pdl),
    )
    return y


@jit
def _tile(weight, first, n, start, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WORDS: tl.constexpr):
    """Load BLOCK_K weights of BLOCK_N outputs from input `start` and output `first` on, a quarter as many if WORDS."""
    EACH: tl.constexpr = 4 if WORDS else 1
    col = first + tl.arange(0, BLOCK_N)
    lane = start // EACH + tl.arange(0, BLOCK_K // EACH)[None, None, :]
    mask = (col < n)[None, :, None] & (lane < K // EACH)
    return tl.load(
        weight + col.to(tl.int64)[None, :, None] * (K // EACH) + lane,
        mask=mask,
        other=0.0,
        eviction_policy="evict_first",
    )


@jit
def _inputs(x, norm, inverse, row, rows, stride, at, K: tl.constexpr):
    """Load the inputs `at` [1, 1, BLOCK_K] of M rows, in float32; with a norm, as the norm rounds them."""
    raw = tl.load(x + row * stride + at, mask=(row < rows) & (at < K), other=0.0)
    return _normed(raw, tl.load(norm + at, mask=at < K, other=0.0) if norm is not None else None, inverse)


@jit
def _normed(raw, factor, inverse):
    """Return inputs in float32; with a norm (`factor`: its weights), as the norm rounds them."""
    values = raw.to(tl.float32)
    if factor is not None:
        values = (values * inverse * factor.to(tl.float32)).to(raw.dtype).to(tl.float32)
    return values


@jit(do_not_specialize=["rows"])
def _few_kernel(
    x,
    weight,
    scales,
    bias,
    residual,
    norm,
    fixed,
    y,
    rows,
    n,
    stride,
    eps,
    K: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    RULE: tl.constexpr,
    POWERS: tl.constexpr,
    MOST: tl.constexpr,
    ACT: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """STEPS * BLOCK_N outputs of up to M <= 4 rows. Grid (ceil(n / (BLOCK_N STEPS)),).

    A program quantizes a chunk of BLOCK_K inputs, multiplies it with BLOCK_N outputs after the other, and goes on with
    the next chunk; the next weights are loaded meanwhile.

    x                   [rows, K];  stride  elements from row to row
    weight              [n, K] e4m3 or int8 (if WORDS [n, K / 4] int32), contiguous; twice the rows if GATED, gate first
    scales              float32: [ceil(n / BLOCK), K / 128], or [n] if BLOCK is 0; twice the rows if GATED
    bias                [n], if GATED [2 n]; or None
    residual            [rows, n] contiguous, or None;  y  [rows, n] contiguous, output
    norm, eps           [K] weight of an RMS norm of x, or None; added to the mean square
    fixed               scale of x with RULE -1, one number
    M                   rows, padded to a power of two
    STEPS, ROOM         times BLOCK_N outputs; STEPS, padded to a power of two
    RULE, POWERS, MOST  see `quantize.triton._quantize_kernel`;  WORDS  four weights are an int32
    """
    GATED: tl.constexpr = ACT != ""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * (STEPS * BLOCK_N)
    lane = tl.arange(0, BLOCK_K)[None, None, :]
    row = tl.arange(0, M)[:, None, None]
    tile = _tile(weight, first, n, 0, K, BLOCK_N, BLOCK_K, WORDS)
    scale = tile_scales(scales, first, n, 0, K, BLOCK_N, BLOCK_K, BLOCK)
    up_weight = weight + n.to(tl.int64) * (K // 4 if WORDS else K)
    up_scales = scales + (n // BLOCK * (K // 128) if BLOCK else n)
    up_tile, up_scale = tile, scale
    if GATED:
        up_tile = _tile(up_weight, first, n, 0, K, BLOCK_N, BLOCK_K, WORDS)
        up_scale = tile_scales(up_scales, first, n, 0, K, BLOCK_N, BLOCK_K, BLOCK)
    factor = tl.load(norm + lane, mask=lane < K, other=0.0) if norm is not None else None
    to_row, to_col = tl.arange(0, M)[:, None], tl.arange(0, ROOM * BLOCK_N)[None, :]
    inside = to_col < STEPS * BLOCK_N
    to_col += first
    inside &= to_col < n
    if BLOCK == 0:
        all_scales = tl.load(scales + to_col, mask=inside, other=0.0)
        if GATED:
            all_up_scales = tl.load(up_scales + to_col, mask=inside, other=0.0)
    inside &= to_row < rows
    if PDL:
        tl.extra.cuda.gdc_wait()
    raw = tl.load(x + row * stride + lane, mask=(row < rows) & (lane < K), other=0.0)
    if residual is not None:  # beside the inputs, not behind the sums
        residual = tl.load(residual + to_row * n + to_col, mask=inside, other=0.0)
    inverse = tl.zeros([M, 1, 1], tl.float32)
    own = tl.zeros([M, 1, 1], tl.float32)
    if norm is not None:
        for start in tl.static_range(0, K, BLOCK_K):
            values = _inputs(x, None, 0, row, rows, stride, start + lane, K) if start > 0 else raw.to(tl.float32)
            inverse += tl.sum(values * values, 2, keep_dims=True)
        inverse = tl.rsqrt(inverse / K + eps)
    if RULE == 0 and BLOCK_K < K:
        largest = tl.zeros([M, 1, 1], tl.int32)
        for start in tl.static_range(0, K, BLOCK_K):
            values = _inputs(x, norm, inverse, row, rows, stride, start + lane, K)
            largest = tl.maximum(largest, tl.max(magnitude(values), 2, keep_dims=True))
        own = scale_of(largest, MOST, POWERS)
    if RULE < 0:
        own += tl.load(fixed)
    out = tl.zeros([M, ROOM, BLOCK_N], tl.float32)
    other = out
    turn = tl.arange(0, ROOM)[None, :, None]
    for start in tl.static_range(0, K, BLOCK_K):
        if start == 0:
            values = _normed(raw, factor, inverse)
        else:
            values = _inputs(x, norm, inverse, row, rows, stride, start + lane, K)
        given = quantized(values, own, -1 if RULE == 0 and BLOCK_K < K else RULE, POWERS, MOST, M, BLOCK_K)
        for step in range(STEPS):
            now, up_now, scale_now, up_scale_now = tile, up_tile, scale, up_scale
            last = step == STEPS - 1
            upcoming = tl.where(last, first, first + (step + 1) * BLOCK_N)
            beyond = start + tl.where(last, BLOCK_K, 0)
            tile = _tile(weight, upcoming, n, beyond, K, BLOCK_N, BLOCK_K, WORDS)
            scale = tile_scales(scales, upcoming, n, beyond, K, BLOCK_N, BLOCK_K, BLOCK)
            part = scaled_sums(now, given, scale_now, M, BLOCK_N, BLOCK_K, BLOCK, MOST, WORDS)
            out += tl.where(turn == step, part[:, None, :], 0.0)
            if GATED:
                up_tile = _tile(up_weight, upcoming, n, beyond, K, BLOCK_N, BLOCK_K, WORDS)
                up_scale = tile_scales(up_scales, upcoming, n, beyond, K, BLOCK_N, BLOCK_K, BLOCK)
                part = scaled_sums(up_now, given, up_scale_now, M, BLOCK_N, BLOCK_K, BLOCK, MOST, WORDS)
                other += tl.where(turn == step, part[:, None, :], 0.0)
    out, other = tl.reshape(out, [M, ROOM * BLOCK_N]), tl.reshape(other, [M, ROOM * BLOCK_N])
    if BLOCK == 0:
        out *= all_scales
        if GATED:
            other *= all_up_scales
    finish(out, other, bias, residual, y, to_row, to_col, n, inside, ACT)
