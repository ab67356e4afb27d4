"""INT8 products of many rows on tensor cores, with scales, bias, gate and residual after the sum. Any GPU with Triton.

Sums are int32 and exact. Floor on an H200: 2 T N K operations over about 1,000 TOP/s.
"""

from __future__ import annotations

from torch import Tensor

from quire.kernels import pdl
from quire.kernels.linear.epilogue import Epilogue, finish
from quire.kernels.linear.scaled_weight import Scaled
from quire.kernels.triton_runtime import jit, tl

BAND = 8  # tiles of rows that run side by side through the same columns, which are then read once


def product(q: Tensor, x_scales: Tensor, packed: Scaled, into: Epilogue) -> Tensor:
    """Multiply the first T rows of q [R, K] int8 with an int8 weight, which has a scale per channel; return `into.y`.

    x_scales   scales of the rows of q: [1, R], or one number for all
    """
    weight, (y, bias, act, residual), gated = packed.values, into, into.gated
    rows, n, k = y.shape[0], weight.shape[0] >> gated, weight.shape[1]
    high, cols, warps, stages = (64, 128, 4, 4) if rows <= 256 else (128, 128 if gated else 256, 8, 3 if gated else 4)
    in_pdl = pdl.in_use()
    _many_kernel[(-(-rows // high) * -(-n // cols),)](
        q,
        x_scales,
        weight,
        packed.scales,
        bias,
        residual,
        y,
        rows,
        n,
        q.stride(0),
        k,
        high,
        cols,
        128,
        x_scales.numel() == 1,
        act,
        BAND,
        in_pdl,
        num_warps=warps,
        num_stages=stages,
        **pdl.options(in_pdl),
    )
    return y


@jit(do_not_specialize=["rows"])
def _many_kernel(
    q,
    x_scales,
    weight,
    scales,
    bias,
    residual,
    y,
    rows,
    n,
    stride,
    K: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FIXED: tl.constexpr,
    ACT: tl.constexpr,
    BAND: tl.constexpr,
    PDL: tl.constexpr,
):
    """M rows by BLOCK_N outputs. Grid (ceil(rows / M) * ceil(n / BLOCK_N),).

    q                  [rows, K] int8;  stride  elements from row to row;  x_scales  [rows] float32, one number if FIXED
    weight             [n, K] int8, contiguous; if GATED [2 n, K], gate first;  scales  [n] or [2 n] float32
    bias, residual, y  as in `gemv._few_kernel`
    BLOCK_K            inputs of an iteration, which divide K;  BAND  tiles of rows that share a column of weights
    """
    GATED: tl.constexpr = ACT != ""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tall, across = (rows + M - 1) // M, (n + BLOCK_N - 1) // BLOCK_N
    band = tl.program_id(0) // (BAND * across) * BAND
    height = tl.minimum(tall - band, BAND)
    number = tl.program_id(0) % (BAND * across)
    row = (band + number % height) * M + tl.arange(0, M)
    col = number // height * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    at = weight + tl.minimum(col, n - 1).to(tl.int64)[None, :] * K + lane[:, None]
    up_at = at + n.to(tl.int64) * K
    given_at = q + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * stride + lane[None, :]
    acc = tl.zeros([M, BLOCK_N], tl.int32)
    up = acc
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in range(0, K, BLOCK_K):
        given = tl.load(given_at + start)
        acc = tl.dot(given, tl.load(at + start), acc, out_dtype=tl.int32)
        if GATED:
            up = tl.dot(given, tl.load(up_at + start), up, out_dtype=tl.int32)
    if FIXED:
        own = tl.zeros([M], tl.float32) + tl.load(x_scales)
    else:
        own = tl.load(x_scales + tl.minimum(row, rows - 1))
    out = acc.to(tl.float32) * (own[:, None] * tl.load(scales + tl.minimum(col, n - 1))[None, :])
    other = out
    if GATED:
        other = up.to(tl.float32) * (own[:, None] * tl.load(scales + n + tl.minimum(col, n - 1))[None, :])
    row, col = row[:, None], col[None, :]
    finish(out, other, bias, residual, y, row, col, n, (row < rows) & (col < n), ACT)
