"""Products of quantized rows with an 8-bit weight on tensor cores: sums of 128 products each, added in float32.

Tensor cores add e4m3 products with 14 bits, so every 128 inputs their sum is multiplied by its scales and added to a
sum in float32. Floor: the bytes of the weight over 4.3 TB/s, or 2 T N K operations over about 1,000 TFLOP/s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.linear.epilogue import Epilogue, finish, give_part, sum_parts
from quire.kernels.linear.gemv import bucket
from quire.kernels.linear.scaled_weight import Scaled
from quire.kernels.triton_runtime import jit, tl

MOST_ROWS = 64
DEEP = 128  # inputs of an iteration: those that share a scale


@dataclass(frozen=True)
class Tiles:
    """The tiling of a program.

    rows     rows of x, padded to a power of two: 16 to 64 (Triton takes Hopper's FP8 products from 16 on)
    cols     outputs of a program
    stages   iterations in flight (num_stages of Triton)
    split    equal parts of K, which programs multiply side by side; the last program to end adds up the sums in order
    """

    rows: int
    cols: int
    warps: int
    stages: int
    split: int = 1


def tiles_of(rows: int, n: int, k: int, gated: bool) -> Tiles:
    """Return the tiling for `rows` rows of x, n outputs and k inputs. gated: n outputs of gate and n of up.

    The tiling is near the best of many, measured on an H200 for the products of Qwen3 8B (docs/log.md).
    """
    size, groups, wide = max(16, bucket(rows)), -(-k // DEEP), -(-n // 64) << gated
    most = max(1, min(k // 512, 8 if size == 16 else 4, 400 // wide))
    stages = 3 if size == 64 and n > 4096 else 5
    return Tiles(size, 64, 4, stages, max(part for part in range(1, most + 1) if groups % part == 0))


def product(q: Tensor, x_scales: Tensor, packed: Scaled, into: Epilogue) -> Tensor:
    """Multiply the first T rows of q [R, K], at most MOST_ROWS (64), with the weight; return `into.y`.

    q, x_scales   results of `quire.kernels.quantize.triton.quantize`: scales [K / 128, R], [1, R] or one number

    Products that run at the same time need different `packed.counters`. These are zeros again afterwards.
    """
    weight, (y, bias, act, residual), gated = packed.values, into, into.gated
    rows, n, k = y.shape[0], weight.shape[0] >> gated, weight.shape[1]
    tiles = tiles_of(rows, n, k, gated)
    in_pdl = pdl.in_use()
    wide = -(-n // tiles.cols)
    parts = None
    if tiles.split > 1:
        parts = q.new_empty(wide * tiles.split * tiles.cols * tiles.rows << gated, dtype=torch.float32)
    _some_kernel[(wide, tiles.split)](
        q,
        x_scales,
        weight,
        packed.scales,
        bias,
        residual,
        y,
        parts,
        packed.counters,
        rows,
        n,
        q.stride(0),
        x_scales.stride(0) if packed.block else 0,
        k,
        tiles.rows,
        tiles.cols,
        DEEP,
        packed.block,
        x_scales.numel() == 1,
        act,
        tiles.stages,
        tiles.split,
        in_pdl,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl.options(in_pdl),
    )
    return y


@jit(do_not_specialize=["rows"])
def _some_kernel(
    q,
    x_scales,
    weight,
    scales,
    bias,
    residual,
    y,
    parts,
    counters,
    rows,
    n,
    stride,
    stride_s,
    K: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    FIXED: tl.constexpr,
    ACT: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of up to M rows, from a part of K. Grid (ceil(n / BLOCK_N), SPLIT).

    q                  [rows, K] e4m3 or int8;  stride  elements from row to row
    x_scales           float32 [K / 128, rows] if BLOCK, stride_s from group to group; [rows]; one number if FIXED
    weight             [n, K] of q's type, contiguous; if GATED [2 n, K], gate first
    scales             float32: [ceil(n / BLOCK), K / BLOCK_K], or [n] if BLOCK is 0; twice the rows if GATED
    bias, residual, y  as in `gemv._few_kernel`
    parts              [ceil(n / BLOCK_N), SPLIT, 1 or 2, BLOCK_N, M] float32: sums of parts of K; None if SPLIT is 1
    counters           [ceil(n / BLOCK_N)] int32, zeros: programs of an output tile that have ended; left as zeros
    BLOCK_K            inputs of an iteration, 128
    STAGES             iterations in flight
    """
    GATED: tl.constexpr = ACT != ""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    EVEN: tl.constexpr = K % BLOCK_K == 0
    GROUPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SHARE: tl.constexpr = GROUPS // SPLIT
    ONE: tl.constexpr = BLOCK >= BLOCK_N and BLOCK % BLOCK_N == 0  # a tile's outputs share their scales
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, M)
    wide = tl.arange(0, BLOCK_K)
    at = weight + tl.minimum(col, n - 1).to(tl.int64)[:, None] * K + wide[None, :]
    up_at = at + n.to(tl.int64) * K
    given_at = q + tl.minimum(row, rows - 1).to(tl.int64)[None, :] * stride + wide[:, None]
    acc = tl.zeros([BLOCK_N, M], tl.float32)
    up = acc
    if ONE:
        scale_at = scales + tl.program_id(0) * BLOCK_N // BLOCK * GROUPS
    else:
        scale_at = scales + tl.minimum(col, n - 1)[:, None] // (BLOCK if BLOCK else 1) * GROUPS
    up_scales = scale_at + n // (BLOCK if BLOCK else 1) * GROUPS
    given_scales = x_scales + tl.minimum(row, rows - 1)[None, :]
    first = tl.program_id(1) * SHARE
    if PDL:
        tl.extra.cuda.gdc_wait()
    for turn in tl.range(0, SHARE, num_stages=STAGES):
        group = first + turn
        start = group * BLOCK_K
        if EVEN:
            tile = tl.load(at + start)
            given = tl.load(given_at + start)
        else:
            tile = tl.load(at + start, mask=start + wide[None, :] < K, other=0.0)
            given = tl.load(given_at + start, mask=start + wide[:, None] < K, other=0.0)
        part = tl.dot(tile, given).to(tl.float32)
        if BLOCK:
            own = tl.load(given_scales + group * stride_s)
            part *= own * tl.load(scale_at + group)
        acc += part
        if GATED:
            if EVEN:
                tile = tl.load(up_at + start)
            else:
                tile = tl.load(up_at + start, mask=start + wide[None, :] < K, other=0.0)
            part = tl.dot(tile, given).to(tl.float32)
            if BLOCK:
                part *= own * tl.load(up_scales + group)
            up += part
    if SPLIT > 1:
        EACH: tl.constexpr = (2 if GATED else 1) * BLOCK_N * M
        lanes = tl.arange(0, BLOCK_N)[:, None] * M + row[None, :]
        part_at = parts + (tl.program_id(0) * SPLIT) * EACH + lanes
        if give_part(acc, up, part_at, counters, tl.program_id(0), GATED) != SPLIT - 1:
            return
        tl.store(counters + tl.program_id(0), 0)
        acc, up = sum_parts(part_at, SPLIT, GATED)
    out, other = acc, up
    if BLOCK == 0:
        own = tl.load(x_scales) if FIXED else tl.load(given_scales)
        out *= tl.load(scales + tl.minimum(col, n - 1))[:, None] * own
        if GATED:
            other *= tl.load(scales + n + tl.minimum(col, n - 1))[:, None] * own
    row, col = row[None, :], col[:, None]
    finish(out, other, bias, residual, y, row, col, n, (row < rows) & (col < n), ACT)
