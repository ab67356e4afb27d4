"""Experts on Hopper (compute capability 9.0): the Triton kernels, and Gluon products for many pairs.

The warps of a program are specialized. Four warps fill a ring of tiles: the copy engine (TMA) reads weights and
contiguous rows; asynchronous copies gather the rows of tokens. Two groups of four warps multiply 64 of a tile's 128
pairs each, with two blocks of 128 outputs: gate and up of an expert, or neighbours. Programs are persistent, one per
multiprocessor, so that the ring fills for the next tile while results are written. A group without pairs leaves the
matrix units to the other group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels.activation.triton import gated_in_gluon
from quire.kernels.attention.hopper import describe
from quire.kernels.attention.triton_plan import multiprocessors
from quire.kernels.experts import triton
from quire.kernels.experts.triton import Packed, Tiles
from quire.kernels.linear.gemv import bucket
from quire.kernels.triton_runtime import gl, gluon_jit, hopper, jit, tl

if hopper is not None:
    async_copy, mbarrier, tma = hopper.async_copy, hopper.mbarrier, hopper.tma
    warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait

ROWS, WIDTH, DEEP = 128, 128, 64  # pairs of a tile, outputs of each of its two blocks, inputs of an iteration
STAGES = 4  # iterations that the ring holds: 48 KiB each
BAND = 32  # tiles of pairs that run side by side through the same columns; 8 are up to 15% slower (H200, docs/log.md)
MOST_SMALL = 24  # up to so many pairs per expert in the mean, the smaller tiles of triton.py are as fast
WORDS = 4  # of a tile's record: expert, first entry in `order`, pairs of the expert from there on, number of tiles

empty, put, destination, run_adapted = triton.empty, triton.put, triton.destination, triton.run_adapted


def run(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    packed: Packed,
    expert_map: Tensor | None = None,
    residual: Tensor | None = None,
    join: Callable[[], bool] | None = None,
) -> Tensor:
    """Return residual + the weighted sum of the outputs of each token's experts.

    See `quire.kernels.experts`. The result overwrites a contiguous `residual`.
    """
    experts, hidden, inner = packed.down.shape
    whole = hidden % DEEP == inner % 8 == x.stride(0) % 16 == x.data_ptr() % 16 == 0  # alignment that the copies need
    mean = ids.numel() / (experts if expert_map is None else len(expert_map))
    return triton.run(
        x, weights, ids, packed, expert_map, residual, join, products if whole and mean > MOST_SMALL else None
    )


def products(
    x: Tensor,
    packed: Packed,
    h: Tensor,
    parts: Tensor,
    order: Tensor,
    starts: Tensor,
    weights: Tensor,
    _cut: tuple[Tiles, Tiles],
) -> None:
    """Compute the expert MLPs of all pairs (token, chosen expert) in two products: x -> h -> parts.

    Arguments as in `triton.products`; `_cut` is not used.
    """
    first, second, act, first_bias, second_bias = packed
    experts, pairs = len(first), len(order)
    most = (pairs + min(experts, pairs) * (ROWS - 1)) // ROWS
    tiles = torch.empty(most * WORDS, dtype=torch.int32, device=x.device)
    _tiles_kernel[(-(-most // 32),)](starts, tiles, most, experts, bucket(experts), ROWS, 32, WORDS, num_warps=4)
    _product(x, first, first_bias, order, tiles, None, h, weights.shape[1], act, most)
    _product(describe(h, [ROWS, DEEP]), second, second_bias, order, tiles, weights, parts, 0, "", most)


def _product(
    x: object,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor,
    tiles: Tensor,
    scales: Tensor | None,
    y: Tensor,
    k: int,
    act: str,
    most: int,
) -> None:
    gated, (width, depth) = scales is None, (y.shape[1], weight.shape[2])
    cols, weight = -(-width // (WIDTH << (not gated))), weight.view(-1, depth)
    _grouped_kernel[(min(multiprocessors(), most * cols),)](
        x,
        describe(weight, [WIDTH, DEEP]),
        bias,
        order,
        tiles,
        scales,
        y,
        x.stride(0) if isinstance(x, Tensor) else 0,
        TOP_K=k,
        N=width,
        K=depth,
        ACT=act,
        COLS=cols,
        BAND=BAND,
        ROWS=ROWS,
        WIDTH=WIDTH,
        DEEP=DEEP,
        STAGES=STAGES,
        WORDS=WORDS,
        num_warps=4,
        maxnreg=168,
    )


@jit(do_not_specialize=["most"])
def _tiles_kernel(
    starts,
    tiles,
    most,
    EXPERTS: tl.constexpr,
    BUCKET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Write the records of all tiles, in the order of experts. Grid (ceil(most / BLOCK),).

    starts            [EXPERTS + 1] int32, see `triton._sort`;  BUCKET  EXPERTS, padded to a power of two
    tiles             [most, WORDS] int32, output;  most  upper bound of the tiles
    ROWS              pairs of a tile
    """
    at = tl.arange(0, BUCKET)
    start = tl.load(starts + at, mask=at < EXPERTS, other=0)
    end = tl.load(starts + at + 1, mask=at < EXPERTS, other=0)
    count = (end - start + ROWS - 1) // ROWS
    after = tl.cumsum(count, 0)[None, :]
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = (tile[:, None] < after) & (tile[:, None] >= after - count[None, :])
    first = start[None, :] + (tile[:, None] - after + count[None, :]) * ROWS
    record, inside = tiles + tile * WORDS, tile < most
    tl.store(record, tl.sum(tl.where(mine, at[None, :], 0), 1), mask=inside)
    tl.store(record + 1, tl.sum(tl.where(mine, first, 0), 1), mask=inside)
    tl.store(record + 2, tl.sum(tl.where(mine, end[None, :] - first, 0), 1), mask=inside)
    tl.store(record + 3, tl.sum(count, 0), mask=inside)


@gluon_jit
def _find(tiles, work, total, COLS: gl.constexpr, BAND: gl.constexpr, WORDS: gl.constexpr):
    """Return the first three words of the record of a piece of work, and the number of its tile of columns.

    work, total   number of the work; tiles of pairs. BAND tiles of pairs share a column before the next column comes
    """
    band = work // (BAND * COLS) * BAND
    height = gl.maximum(gl.minimum(total - band, BAND), 1)
    number = work - band * COLS
    record = tiles + (band + number % height) * WORDS
    return gl.load(record), gl.load(record + 1), gl.load(record + 2), number // height


@gluon_jit
def _read(
    x,
    weight,
    order,
    tiles,
    rings,
    bars,
    stride,
    TOP_K: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    GATED: gl.constexpr,
    COLS: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
    WORDS: gl.constexpr,
):
    """The reading warps. Arguments as in `_grouped_kernel`.

    rings   buffers [STAGES, ...] in shared memory: rows of x, first and second block of weights
    bars    barriers by stage: the copies have written it (ready); both groups are done with it (free)
    """
    rows, left_cols, right_cols = rings
    ready, free = bars
    ROWS: gl.constexpr = rows.shape[1]
    WIDTH: gl.constexpr = left_cols.shape[1]
    DEEP: gl.constexpr = rows.shape[2]
    GATHER: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (DEEP // 8), DEEP // 8], [4, 1], [1, 0])
    total = gl.load(tiles + 3)
    count = 0
    for work in range(gl.program_id(0), total * COLS, gl.num_programs(0)):
        expert, first, left, col = _find(tiles, work, total, COLS, BAND, WORDS)
        if GATED:
            at = expert * (2 * N) + col * WIDTH
            beside = at + N
        else:
            at = expert * N + col * (2 * WIDTH)
            beside = at + WIDTH
        if TOP_K > 0:
            lane = gl.arange(0, ROWS, gl.SliceLayout(1, GATHER))
            token = gl.load(order + first + gl.minimum(lane, left - 1)) // TOP_K
            source = x + token.to(gl.int64)[:, None] * stride + gl.arange(0, DEEP, gl.SliceLayout(0, GATHER))[None, :]
        for start in range(0, K, DEEP):
            stage, phase = count % STAGES, (count // STAGES) & 1
            bar = ready.index(stage)
            mbarrier.wait(free.index(stage), phase ^ 1)
            if TOP_K > 0:
                mbarrier.expect(bar, 2 * weight.block_type.nbytes)
                async_copy.async_copy_global_to_shared(rows.index(stage), source + start)
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                mbarrier.expect(bar, 2 * weight.block_type.nbytes + x.block_type.nbytes)
                tma.async_copy_global_to_shared(x, [first, start], bar, rows.index(stage))
            tma.async_copy_global_to_shared(weight, [at, start], bar, left_cols.index(stage))
            tma.async_copy_global_to_shared(weight, [beside, start], bar, right_cols.index(stage))
            count += 1


@gluon_jit
def _write(y, values, out, place, col, left, HALF: gl.constexpr, N: gl.constexpr, STORE: gl.constexpr):
    """Write 64 rows of results to the rows `place` [64] of y, from column `col` on, through the group's buffer `out`.

    left   pairs of the tile; rows of a half past them are not written
    """
    out.store(values.to(y.dtype.element_ty))
    values = out.load(STORE)
    cols = col + gl.arange(0, values.shape[1], gl.SliceLayout(0, STORE))
    lane = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, STORE))
    mask = (lane < left)[:, None] & (cols < N)[None, :]
    gl.store(y + place.to(gl.int64)[:, None] * N + cols[None, :], values, mask=mask)


@gluon_jit
def _added(values, bias, at, col, N: gl.constexpr):
    """Return values [rows, cols] + the bias of their columns. at: place of the expert's bias; col: the first column."""
    if bias is None:
        return values
    else:
        cols = col + gl.arange(0, values.shape[1], gl.SliceLayout(0, values.type.layout))
        return values + gl.load(bias + at + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]


@gluon_jit
def _multiply(
    bias,
    order,
    tiles,
    scales,
    y,
    rings,
    outs,
    bars,
    HALF: gl.constexpr,
    TOP_K: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    ACT: gl.constexpr,
    COLS: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
    WORDS: gl.constexpr,
):
    """A computing group of four warps: the first (HALF 0) or second 64 rows of every tile.

    Arguments as in `_grouped_kernel` and `_read`; outs: buffers of results, one per group.
    """
    GATED: gl.constexpr = ACT != ""
    rows, left_cols, right_cols = rings
    ready, free = bars
    out = outs.index(HALF)
    WIDTH: gl.constexpr = left_cols.shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    total = gl.load(tiles + 3)
    count = 0
    expert, first, left, col = _find(tiles, gl.program_id(0), total, COLS, BAND, WORDS)
    for work in range(gl.program_id(0), total * COLS, gl.num_programs(0)):
        upcoming = gl.minimum(work + gl.num_programs(0), total * COLS - 1)  # read meanwhile
        next_expert, next_first, next_left, next_col = _find(tiles, upcoming, total, COLS, BAND, WORDS)
        if left > HALF * 64:
            lane = first + gl.minimum(HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, STORE)), left - 1)
            if GATED:
                place = lane
            else:
                place = gl.load(order + lane)
                row = first + gl.minimum(HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS)), left - 1)
                scale = gl.load(scales + gl.load(order + row))[:, None]
            one = gl.zeros([64, WIDTH], gl.float32, SUMS)
            two = gl.zeros([64, WIDTH], gl.float32, SUMS)
            for start in range(0, K, rows.shape[2]):
                stage = count % STAGES
                mbarrier.wait(ready.index(stage), (count // STAGES) & 1)
                if TOP_K > 0:
                    hopper.fence_async_shared()  # the gathered rows were not written by the copy engine
                given = rows.index(stage).slice(HALF * 64, 64)
                one = warpgroup_mma(given, left_cols.index(stage).permute((1, 0)), one, is_async=True)
                two = warpgroup_mma(given, right_cols.index(stage).permute((1, 0)), two, is_async=True)
                one, two = warpgroup_mma_wait(2, deps=(one, two))
                mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=start > 0)
                count += 1
            one, two = warpgroup_mma_wait(0, deps=(one, two))
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))
            at = expert.to(gl.int64) * (N << GATED)
            if GATED:
                one = _added(one, bias, at, col * WIDTH, N)
                two = _added(two, bias, at + N, col * WIDTH, N)
                _write(y, gated_in_gluon(one, two, ACT), out, place, col * WIDTH, left, HALF, N, STORE)
            else:
                one = _added(one, bias, at, col * (2 * WIDTH), N)
                two = _added(two, bias, at, col * (2 * WIDTH) + WIDTH, N)
                _write(y, one * scale, out, place, col * (2 * WIDTH), left, HALF, N, STORE)
                _write(y, two * scale, out, place, col * (2 * WIDTH) + WIDTH, left, HALF, N, STORE)
        else:
            for _start in range(0, K, rows.shape[2]):
                mbarrier.wait(ready.index(count % STAGES), (count // STAGES) & 1)
                mbarrier.arrive(free.index(count % STAGES))
                count += 1
        expert, first, left, col = next_expert, next_first, next_left, next_col


@gluon_jit
def _grouped_kernel(
    x,
    weight,
    bias,
    order,
    tiles,
    scales,
    y,
    stride,
    TOP_K: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    ACT: gl.constexpr,
    COLS: gl.constexpr,
    BAND: gl.constexpr,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    DEEP: gl.constexpr,
    STAGES: gl.constexpr,
    WORDS: gl.constexpr,
):
    """Grid: as many programs as multiprocessors. 4 warps, 168 registers per thread (redistributed inside).

    x                  if TOP_K: [T, K] by token, with TOP_K pairs each; stride  elements from row to row
                       if TOP_K is 0: descriptor of rows [pairs, K] in sorted order, in tiles [ROWS, DEEP]
    weight             descriptor of all experts' weights as rows [R, K], in tiles [WIDTH, DEEP]
    bias               [experts, 2 N] if GATED, else [experts, N]; or None
    order, tiles       [pairs] int32, see `triton._sort`; [most, WORDS] int32, see `_tiles_kernel`
    scales             [T, k] float32 routing weights, None if GATED
    y                  [pairs, N], output: the activation in sorted order if GATED, else weighted results by pair
    N, K               outputs and inputs of an expert;  COLS, BAND  tiles of columns; tiles of pairs side by side
    ROWS, WIDTH, DEEP, STAGES   pairs of a tile; outputs of a block; inputs of an iteration; iterations in the ring
    ACT                see `gated_of`, of the products that are GATED; "": of down
    """
    GATED: gl.constexpr = ACT != ""
    ring: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DEEP], y.dtype.element_ty)
    rows = gl.allocate_shared_memory(y.dtype.element_ty, [STAGES, ROWS, DEEP], ring)
    left_cols = gl.allocate_shared_memory(y.dtype.element_ty, [STAGES, WIDTH, DEEP], weight.layout)
    right_cols = gl.allocate_shared_memory(y.dtype.element_ty, [STAGES, WIDTH, DEEP], weight.layout)
    buffer: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS // 2, WIDTH], y.dtype.element_ty)
    outs = gl.allocate_shared_memory(y.dtype.element_ty, [2, ROWS // 2, WIDTH], buffer)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=129 if TOP_K > 0 else 1)  # every thread that gathers, and the copy engine
        mbarrier.init(free.index(i), count=2)  # both groups
    rings, bars = (rows, left_cols, right_cols), (ready, free)
    gl.warp_specialize(
        [
            (
                _multiply,
                (bias, order, tiles, scales, y, rings, outs, bars, 0, TOP_K, N, K, ACT, COLS, BAND, STAGES, WORDS),
            ),
            (
                _multiply,
                (bias, order, tiles, scales, y, rings, outs, bars, 1, TOP_K, N, K, ACT, COLS, BAND, STAGES, WORDS),
            ),
            (
                _read,
                (x, weight, order, tiles, rings, bars, stride, TOP_K, N, K, GATED, COLS, BAND, STAGES, WORDS),
            ),
        ],
        [4, 4],
        [208, 88],
    )
