"""Products of experts on Hopper with weights in words, in Gluon: those of `words`, for the pairs of one expert each.

A pair is a token with one of its experts. Pairs are sorted by expert (`experts.triton._sort`). The rows of x are copied
into this order first, so that the copy engine (TMA) can read them. A program multiplies up to M pairs of an expert by
64 or 128 outputs; rows of the next expert, which it reads with them, it leaves out.

Floor on an H200: the packed bytes of the experts that are hit over 4.3 TB/s, or 6 T k I H operations over 780 TFLOP/s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.activation.triton import gated_in_gluon
from quire.kernels.attention.hopper import describe
from quire.kernels.experts.hopper import _find, _tiles_kernel
from quire.kernels.linear.gemv import bucket
from quire.kernels.triton_runtime import gl, gluon_jit, jit, tl
from quire.kernels.weight_only.words import STEP, _walk

RECORD = 4  # numbers of the record of a tile of pairs: see `experts.hopper._tiles_kernel`
RECORDS = 32  # that a program writes
BAND = 8  # tiles of pairs that run side by side through the same columns of weights, which are then read once
SHARED = 224 << 10  # bytes of shared memory of a multiprocessor
PROGRAMS = 528  # 4 for each multiprocessor of an H200


@dataclass(frozen=True)
class Tiles:
    """The tiling of the products.

    rows     pairs of a tile
    stages   steps (`words.STEP` inputs each) that the ring of buffers in shared memory holds
    tall     most blocks of 64 outputs that a program computes: 1 or 2
    """

    rows: int
    stages: int
    tall: int


@dataclass(frozen=True)
class Sorted:
    """Pairs in the order of their experts.

    x        [pairs, K]: the row of each pair's token
    order    [pairs] int32: number of the pair, token * k + place among the token's experts
    tiles    [most, RECORD] int32 records of tiles of `cut.rows` pairs
    """

    x: Tensor
    order: Tensor
    tiles: Tensor
    cut: Tiles


def tiles_of(pairs: int, experts: int, outputs: int) -> Tiles:
    """Return the tiling for `pairs` pairs of `experts` experts, of which each has so many outputs.

    Pairs of few rows share a program with many outputs, because each program reads its rows of x again.
    """
    mean = pairs / experts
    rows = next((rows for rows, most in ((8, 5), (16, 10), (32, 24), (64, 48)) if mean <= most), 128)
    most = _most(pairs, experts, rows) * -(-outputs // 128)
    tall = 2 if most >= PROGRAMS else 1
    together = {8: 4, 16: 4, 32: 4, 64: 3, 128: 2}[rows]  # programs of a multiprocessor
    stage = tall * STEP * 32 + rows * STEP * 2  # bytes
    return Tiles(rows, max(3, min(6, SHARED // together // stage)), tall)


def _most(pairs: int, experts: int, rows: int) -> int:
    """Return the most tiles of `rows` pairs of an expert each, whatever experts they have."""
    return (pairs + min(experts, pairs) * (rows - 1)) // rows


def bring(x: Tensor, order: Tensor, starts: Tensor, k: int, cut: Tiles) -> Sorted:
    """Copy the rows of x [T, K] into the order of pairs, and write the records of their tiles.

    order, starts   see `experts.triton._sort`;  k  experts of a token
    """
    (pairs,), experts, width = order.shape, len(starts) - 1, x.shape[1]
    most = _most(pairs, experts, cut.rows)
    rows, tiles = x.new_empty(pairs, width), torch.empty(most * RECORD, dtype=torch.int32, device=x.device)
    in_pdl, programs = pdl.in_use(), -(-most // RECORDS)
    _bring_kernel[(programs + pairs,)](
        x,
        order,
        starts,
        tiles,
        rows,
        x.stride(0),
        most,
        programs,
        width,
        k,
        experts,
        bucket(experts),
        cut.rows,
        RECORDS,
        RECORD,
        min(1024, bucket(width)),
        in_pdl,
        num_warps=4,
        **pdl.options(in_pdl),
    )
    return Sorted(rows, order, tiles, cut)


@dataclass(frozen=True)
class Ending:
    """Operations on the sums of a product, and the tensor for the results.

    y         [pairs, N]
    act       activation (`quire.kernels.activation`) of the weights of gate and up: y is in the order of experts.
              "": no activation, and y is by number of the pair
    bias      [E, 2 N] with an activation, else [E, N]; None: no bias
    routing   [T, k] float32 weights of the results; None with an activation
    """

    y: Tensor
    act: str
    bias: Tensor | None
    routing: Tensor | None = None


def product(given: Sorted, words: Tensor, scales: Tensor, group: int, into: Ending) -> Tensor:
    """Multiply the rows of pairs with the weights of their experts; return `into.y`.

    words     int32 [E, units, .., 32, 4], of each expert as `words.repack` returns them
    scales    [E, units, .., 16], as `words.repack_scales` returns them, or of weights in E2M1 `words.repack_powers`
    group     inputs that share a scale, a multiple of 32
    """
    cut, y, in_pdl = given.cut, into.y, pdl.in_use()
    k, units, n = given.x.shape[1], words.shape[1], y.shape[1]
    lines = words.view(len(words) * units, -1, 32)
    bits = lines.shape[1] // (2 * -(-k // STEP))
    tall = cut.tall if units % 8 == 0 else 1
    cols, most = units // (4 * tall), len(given.tiles) // RECORD
    _pairs_kernel[(most * cols,)](
        describe(given.x, [cut.rows, STEP]),
        describe(lines, [4 * tall, 2 * bits, 32]),
        scales,
        given.order,
        given.tiles,
        into.bias,
        into.routing,
        y,
        n,
        K=k,
        GROUP=group,
        UNITS=units,
        M=cut.rows,
        TALL=tall,
        BITS=bits,
        ACT=into.act,
        BAND=BAND,
        STAGES=cut.stages,
        RECORD=RECORD,
        PDL=in_pdl,
        num_warps=4,
        **pdl.options(in_pdl),
    )
    return y


@jit(do_not_specialize=["most", "programs"])
def _bring_kernel(
    x,
    order,
    starts,
    tiles,
    rows,
    stride,
    most,
    programs,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    RECORDS: tl.constexpr,
    RECORD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy a pair's row of x; the first programs write records of tiles. Grid (programs + pairs,).

    x               [T, K];  stride  elements from row to row
    order, starts   see `experts.triton._sort`;  tiles, most, EXPERTS, WIDTH, M  see `experts.hopper._tiles_kernel`
    rows            [pairs, K], output
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.program_id(0) - programs
    if place < 0:
        _tiles_kernel(starts, tiles, most, EXPERTS, WIDTH, M, RECORDS, RECORD)
    elif place < tl.load(starts + EXPERTS):
        source = x + (tl.load(order + place) // TOP_K).to(tl.int64) * stride
        for first in range(0, K, BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(rows + place.to(tl.int64) * K + at, tl.load(source + at, mask=at < K), mask=at < K)


@gluon_jit
def _finish_pairs(acc, order, bias, routing, y, first_col, first, left, n, ACT: gl.constexpr, OUT: gl.constexpr):
    """Apply bias, and activation or routing, to sums [outputs of units, M] of an expert's pairs, and store them.

    bias          of the expert, or None
    first_col     the first output (of gate, with ACT);  OUT  layout of the results
    first, left   the first pair in the order of experts; pairs of the expert from there on
    """
    GATED: gl.constexpr = ACT != ""
    HEIGHT: gl.constexpr = acc.shape[0]
    M: gl.constexpr = acc.shape[1]
    if GATED:
        acc, up = gl.split(acc.reshape([HEIGHT // 16, 2, 8, M]).permute([0, 2, 3, 1]).reshape([HEIGHT // 2, M, 2]))
        up = gl.convert_layout(up, OUT)
    out = gl.convert_layout(acc, OUT)
    col = first_col + gl.arange(0, out.shape[0], gl.SliceLayout(1, OUT))
    lane = gl.arange(0, M, gl.SliceLayout(0, OUT))
    to = first + lane
    if bias is not None:
        out += gl.load(bias + col, mask=col < n, other=0.0).to(gl.float32)[:, None]
    if GATED:
        if bias is not None:
            up += gl.load(bias + n + col, mask=col < n, other=0.0).to(gl.float32)[:, None]
        out = gated_in_gluon(out, up, ACT)
    else:
        to = gl.load(order + to, mask=lane < left, other=0)
        out *= gl.load(routing + to, mask=lane < left, other=0.0)[None, :]
    at = to.to(gl.int64)[None, :] * n + col[:, None]
    gl.store(y + at, out.to(y.dtype.element_ty), mask=(col < n)[:, None] & (lane < left)[None, :])


@gluon_jit
def _pairs_kernel(
    x,
    words,
    scales,
    order,
    tiles,
    bias,
    routing,
    y,
    n,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    UNITS: gl.constexpr,
    M: gl.constexpr,
    TALL: gl.constexpr,
    BITS: gl.constexpr,
    ACT: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
    RECORD: gl.constexpr,
    PDL: gl.constexpr,
):
    """64 TALL outputs of units, of M pairs of an expert. Grid (most tiles of pairs * tiles of units,).

    x                        descriptor of [pairs, K] bf16 in the order of experts, in tiles [M, 128]
    words                    descriptor of [E * UNITS, lines, 32] int32 in tiles [4 TALL, 2 BITS, 32]
    scales                   as in `words._few_kernel`, of all experts
    order, tiles             see `Sorted`
    bias, routing, y, ACT    see `Ending`;  n  outputs (of gate, with ACT)
    UNITS, M, TALL, STAGES   units of 16 outputs of an expert; see `Tiles`
    """
    GATED: gl.constexpr = ACT != ""
    if PDL:
        if GATED:  # the kernel before writes the records, which the next one then reads before it waits
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    COLS: gl.constexpr = UNITS // (4 * TALL)
    WAIT: gl.constexpr = PDL and not GATED
    total = gl.load(tiles + 3)
    expert, first, left, col = _find(tiles, gl.program_id(0), total, COLS, BAND, RECORD)
    if (left <= 0) | (col >= COLS):
        if WAIT:
            tl.extra.cuda.gdc_wait()
        return
    unit = expert * UNITS + col * (4 * TALL)
    STEPS: gl.constexpr = (K + 127) // 128
    acc = _walk(x, words, scales, None, unit, first, 0, STEPS, K, GROUP, M, TALL, BITS, True, STAGES, WAIT)
    OUT: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    if bias is not None:
        bias += expert * (n << GATED)
    _finish_pairs(acc, order, bias, routing, y, col * (64 * TALL >> GATED), first, left, n, ACT, OUT)
