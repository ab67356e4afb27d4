"""Products of experts on NVIDIA GPUs with weights in tiles, in Triton: those of `tiles`, for pairs of an expert each.

Pairs (token, chosen expert) are sorted by expert, as in `quire.kernels.experts.triton`. Floor: see `pairs_in_words`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.scheme import Scheme
from quire.kernels import pdl
from quire.kernels.activation.triton import gated_of
from quire.kernels.attention.triton_plan import shared_memory
from quire.kernels.experts.triton import _find_tile
from quire.kernels.linear.gemv import bucket
from quire.kernels.triton_runtime import INTERPRETED, jit, tl
from quire.kernels.weight_only.pairs_in_words import Ending
from quire.kernels.weight_only.tiles import ROWS, _sums, load_scale

BAND = 8  # tiles of pairs that run side by side through the same columns of weights, which are then read once


@dataclass(frozen=True)
class Stack:
    """The gate_up or down matrices of all E experts: K inputs, N outputs, twice N where gate and up are stacked.

    K is a multiple of the inputs of an iteration, and N of gate and of up is the K of down: added numbers are zero.

    tiles     uint8 [E, (2) * ceil(N / 64), K / deep, 64, deep * bits / 8], see `weight_only.tiles.repack`
    scales    float32 [E, groups, (2) * N]; of MXFP4 uint8 (E8M0), of NVFP4 uint8 (E4M3)
    zeros     uint8 zero points, as scales; None: all are 8 (4 bits) or 128 (8 bits)
    factors   float32 [E, (2) * N] of NVFP4; None: 1
    columns   int32 [E, K]: the column of x that each column of the weight multiplies; None: columns in their order
    parts     2 where gate and up are stacked, else 1
    """

    tiles: Tensor
    scales: Tensor
    zeros: Tensor | None
    factors: Tensor | None
    columns: Tensor | None
    parts: int
    scheme: Scheme

    @property
    def deep(self) -> int:
        """Inputs of an iteration."""
        return self.tiles.shape[4] * 8 // self.scheme.bits

    @property
    def inputs(self) -> int:
        """Number of inputs K."""
        return self.tiles.shape[2] * self.deep

    @property
    def outputs(self) -> int:
        """Number of outputs N, of gate and of up each."""
        return self.scales.shape[2] // self.parts


@dataclass(frozen=True)
class Tiles:
    """The tiling of a product: pairs of a tile, warps, iterations in flight (num_stages of Triton).

    first   True: weights are scaled before the product, in x's dtype. False: the sum of each iteration is scaled.
            Not for MXFP4 and NVFP4, see `weight_only.tiles.Tiles`
    """

    rows: int
    warps: int
    stages: int
    first: bool


def tiles_of(pairs: int, experts: int) -> Tiles:
    """Return the tiling of both products, by the mean number of pairs (token, chosen expert) per expert."""
    mean = pairs / experts
    rows = next((rows for rows in (16, 32, 64) if mean <= rows * 3 / 4), 128)
    return Tiles(rows, 4, 4, rows > 32)


def product(x: Tensor, stack: Stack, order: Tensor, starts: Tensor, k: int, into: Ending, cut: Tiles) -> None:
    """Multiply the rows of pairs with the weights of their experts; `into.y` gets the results.

    x               with an activation [T, K] by token, else [pairs, K] in the order of experts
    order, starts   see `experts.triton._sort`;  k  experts of a token
    """
    gated, in_pdl, pairs, experts, bits = into.act != "", pdl.in_use(), len(order), len(stack.tiles), stack.scheme.bits
    most = (pairs + min(experts, pairs) * (cut.rows - 1)) // cut.rows  # tiles of pairs
    room = shared_memory() // (stack.deep * (x.element_size() * cut.rows + (ROWS * bits // 8 << gated)))
    stages = max(1, min(cut.stages, room))
    _packed_kernel[(most * -(-stack.outputs // ROWS),)](
        x,
        stack.tiles,
        stack.scales,
        stack.zeros,
        stack.factors,
        stack.columns,
        into.bias,
        order,
        starts,
        into.routing,
        into.y,
        x.stride(0),
        k,
        experts,
        bucket(experts),
        stack.outputs,
        stack.inputs,
        stack.inputs // stack.scales.shape[1],
        cut.rows,
        ROWS,
        stack.deep,
        bits,
        into.act,
        stack.scheme.factor or (x.dtype == torch.bfloat16 if stack.scheme.kind == "mxfp4" else cut.first),
        BAND,
        stages,
        not INTERPRETED,
        in_pdl,
        num_warps=cut.warps,
        num_stages=stages,
        **pdl.options(in_pdl),
    )


@jit
def _packed_kernel(
    x,
    tiles,
    scales,
    zeros,
    factors,
    columns,
    bias,
    order,
    starts,
    routing,
    y,
    stride,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    DEEP: tl.constexpr,
    BITS: tl.constexpr,
    ACT: tl.constexpr,
    FIRST: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of M pairs of an expert by ROWS outputs, on tensor cores. Grid (tiles of pairs * tiles of outputs,).

    x                  GATED: [T, K] by token, else [pairs, K] in sorted order;  stride  elements from row to row
    tiles .. columns   see `Stack`;  bias  [experts, 2 N] if GATED, else [experts, N]; or None
    order, starts      see `experts.triton._sort`;  routing  [T, TOP_K] float32 routing weights, None if GATED
    y                  [pairs, N], output: the activation in sorted order if GATED, else weighted results by pair
    EXPERTS, WIDTH     experts of this rank; padded to a power of two;  GROUP  inputs that share a scale
    DEEP, BITS         inputs of an iteration; bits of a weight, 4 or 8;  FIRST  see `Tiles`
    BAND, STAGES       tiles of pairs that share outputs; iterations in flight;  ASM  see `_numbers`
    ACT                see `gated_of`, of the products that are GATED; "": of down
    """
    GATED: tl.constexpr = ACT != ""
    if PDL and GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # the order is there: the next kernel may read it before it waits
    COLS: tl.constexpr = (N + ROWS - 1) // ROWS
    expert, first, left, tile = _find_tile(starts, EXPERTS, WIDTH, M, COLS, BAND)
    row = tl.arange(0, M)
    pair = tl.load(order + first + row, mask=row < left, other=0)
    if PDL and not GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if left <= 0:
        return
    E2M1: tl.constexpr = scales.dtype.element_ty == tl.uint8
    E4M3: tl.constexpr = factors is not None
    BYTES: tl.constexpr = DEEP * BITS // 8
    STEPS: tl.constexpr = K // DEEP
    TOTAL: tl.constexpr = N << GATED
    source = pair // TOP_K if GATED else first + tl.where(row < left, row, 0)
    expert = expert.to(tl.int64)
    lane = tl.arange(0, BYTES)[:, None]
    col = tile * ROWS + tl.arange(0, ROWS)[:, None]
    one = expert * (K // GROUP * TOTAL) + tl.minimum(col, N - 1)
    at = tiles + (expert * (COLS << GATED) + tile) * (STEPS * ROWS * BYTES)
    at += tl.arange(0, ROWS)[:, None] * BYTES + tl.trans(lane)
    x_at = x + source.to(tl.int64)[None, :] * stride
    acc = tl.zeros([ROWS, M], tl.float32)
    up = acc
    for turn in tl.range(0, STEPS, num_stages=STAGES):
        low = turn * DEEP + lane
        high = low + DEEP // 2
        if columns is not None:
            low = tl.load(columns + expert * K + low)
            if BITS == 4:
                high = tl.load(columns + expert * K + high)
        scale_at = turn * DEEP // GROUP * TOTAL + one
        scale = load_scale(scales, scale_at, E4M3)
        other = scale
        if E4M3:
            other = load_scale(scales, scale_at + TOTAL, E4M3)
        zero = tl.zeros([ROWS, 1], tl.float32) + (8.0 if BITS == 4 else 128.0)
        if zeros is not None:
            zero = tl.load(zeros + scale_at).to(tl.float32)
        acc = _sums(
            at + turn * (ROWS * BYTES), x_at + low, x_at + high, scale, other, zero, acc, BITS, E2M1, FIRST, ASM
        )
        if GATED:
            scale = load_scale(scales, scale_at + N, E4M3)
            other = scale
            if E4M3:
                other = load_scale(scales, scale_at + TOTAL + N, E4M3)
            if zeros is not None:
                zero = tl.load(zeros + scale_at + N).to(tl.float32)
            up_at = at + (COLS * STEPS + turn) * (ROWS * BYTES)
            up = _sums(up_at, x_at + low, x_at + high, scale, other, zero, up, BITS, E2M1, FIRST, ASM)
    if factors is not None:
        factors += expert * TOTAL + tl.minimum(col, N - 1)
        acc *= tl.load(factors)
        if GATED:
            up *= tl.load(factors + N)
    row, pair = row[None, :], pair[None, :]
    to = first + row
    if bias is not None:
        bias += expert * TOTAL + col
        acc += tl.load(bias, mask=col < N, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + N, mask=col < N, other=0.0).to(tl.float32)
    if GATED:
        acc = gated_of(acc, up, ACT)
    else:
        to = pair
        acc *= tl.load(routing + pair, mask=row < left, other=0.0)
    tl.store(y + to.to(tl.int64) * N + col, acc.to(y.dtype.element_ty), mask=(row < left) & (col < N))
