"""Products of many pairs on Hopper for FP8 weights in blocks of 128 x 128: the twin of `quire.kernels.experts.hopper`.

The tensor cores add e4m3 products in about 14 bits, so each 128 inputs get new sums; a computing group multiplies them
by the scales of their rows and block, and adds them in float32. Meanwhile the matrix units work for the other group.
A tile has the gate and up columns of the same 128 numbers, which are quantized for the second product where they are
computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.activation.triton import gated_in_gluon
from quire.kernels.attention.hopper import describe
from quire.kernels.attention.triton_plan import multiprocessors
from quire.kernels.experts.hopper import ROWS, WORDS, _find, _tiles_kernel, _write
from quire.kernels.linear.gemv import bucket
from quire.kernels.quantize.triton import GROUP
from quire.kernels.triton_runtime import gl, gluon_jit, hopper

if TYPE_CHECKING:
    from quire.kernels.experts.scaled_stack import Packed, Stack

if hopper is not None:
    async_copy, mbarrier, tma = hopper.async_copy, hopper.mbarrier, hopper.tma
    warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait


@dataclass(frozen=True)
class Form:
    """Launch parameters of a product of the expert MLP (gate and up, or down).

    stages     iterations that the ring of buffers in shared memory holds: 48 KiB each
    band       tiles of pairs (token, chosen expert) that run side by side through the same columns of weights
    computing, reading   registers per thread of the computing warps, and of the reading warps
    readers    number of reading warps
    """

    stages: int = 4
    band: int = 32
    computing: int = 224
    reading: int = 56
    readers: int = 4


UP = Form()
DOWN = Form(computing=232, reading=40, readers=1)


def products(
    x: tuple[Tensor, Tensor],
    packed: Packed,
    order: Tensor,
    starts: Tensor,
    weights: Tensor,
    parts: Tensor,
) -> None:
    """Compute the expert MLPs of all pairs (token, chosen expert) in two products, and write them to `parts`.

    x        e4m3 [R, H] by token, float32 [H / 128, R]: quantized activations and their scales
    packed   the stacked matrices gate_up and down
    order    [pairs] int32: numbers of the pairs, sorted by expert; pair p belongs to token p // k
    starts   [experts + 1] int32: first entry of each expert in `order`
    weights  [T, k] float32 routing weights
    parts    [pairs, H], output in the order of pair numbers: down, times the routing weight
    """
    first, second, act = packed[:3]
    tiles, k = _tiles(starts, len(order)), weights.shape[1]
    h = torch.empty((len(order), second.values.shape[2]), dtype=torch.float8_e4m3fn, device=parts.device)
    scales = torch.empty((h.shape[1] // GROUP, len(h)), dtype=torch.float32, device=parts.device)
    _product(x[0], x[1], first, order, tiles, None, h, scales, k, second.powers, act, UP)
    rows = describe(h, [ROWS, GROUP])
    _product(rows, scales, second, order, tiles, weights, parts, None, 0, False, "", DOWN)


def _tiles(starts: Tensor, pairs: int) -> Tensor:
    """Return the work list of both products, int32 [most tiles * WORDS]: a record for each tile of pairs.

    A kernel fills the list on the device. The comment at WORDS in `quire.kernels.experts.hopper` describes a record.

    starts   [experts + 1] int32: first sorted pair of each expert
    pairs    number of pairs (token, chosen expert) of all experts
    """
    experts = len(starts) - 1
    most = (pairs + min(experts, pairs) * (ROWS - 1)) // ROWS
    tiles = torch.empty(most * WORDS, dtype=torch.int32, device=starts.device)
    _tiles_kernel[(-(-most // 32),)](starts, tiles, most, experts, bucket(experts), ROWS, 32, WORDS, num_warps=4)
    return tiles


def _product(
    x: object,
    x_scales: Tensor,
    stack: Stack,
    order: Tensor,
    tiles: Tensor,
    routing: Tensor | None,
    y: Tensor,
    y_scales: Tensor | None,
    k: int,
    powers: bool,
    act: str,
    form: Form,
) -> None:
    (_, _, depth), width, gated = stack.values.shape, y.shape[1], routing is None
    most, cols = len(tiles) // WORDS, -(-width // (GROUP << (not gated)))
    _scaled_kernel[(min(multiprocessors(), most * cols),)](
        x,
        x_scales,
        describe(stack.values.view(-1, depth), [GROUP, GROUP]),
        stack.scales,
        order,
        tiles,
        routing,
        y,
        y_scales,
        x.stride(0) if isinstance(x, Tensor) else 0,
        x_scales.stride(0),
        0 if y_scales is None else y_scales.stride(0),
        TOP_K=k,
        N=width,
        K=depth,
        ACT=act,
        POWERS=powers,
        COLS=cols,
        BAND=form.band,
        ROWS=ROWS,
        STAGES=form.stages,
        WORDS=WORDS,
        COMPUTING=form.computing,
        READING=form.reading,
        READERS=form.readers,
        num_warps=4,
        maxnreg=168,
    )


@gluon_jit
def _blocks(expert, col, N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr):
    """Return the numbers of the tile's two blocks of 128 outputs among those of all experts."""
    HIGH: gl.constexpr = N // 128
    if GATED:
        one = expert * (2 * HIGH) + col
        two = one + HIGH
    else:
        one = expert * HIGH + 2 * col
        two = expert * HIGH + gl.minimum(2 * col + 1, HIGH - 1)
    return one, two


@gluon_jit
def _source(order, first, left, ROWS: gl.constexpr, TOP_K: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the rows of x of a tile's pairs. Pairs past the end repeat the last."""
    at = first + gl.minimum(gl.arange(0, ROWS, LAYOUT), gl.maximum(left, 1) - 1)
    if TOP_K > 0:
        at = gl.load(order + at) // TOP_K
    return at


@gluon_jit
def _read(
    x,
    x_scales,
    weight,
    w_scales,
    order,
    tiles,
    rings,
    scale_rings,
    ready,
    free,
    stride,
    stride_s,
    TOP_K: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    GATED: gl.constexpr,
    COLS: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
    WORDS: gl.constexpr,
    READERS: gl.constexpr,
):
    """The reading warps. Arguments as in `_scaled_kernel`. The rows of the next tile are found in advance.

    rings         buffers [STAGES, 128, 128] in shared memory: rows of x, first and second block of weights
    scale_rings   buffers of their scales: [STAGES, 128], [STAGES, 1], [STAGES, 1]
    ready, free   barriers by stage: the copies have written it; both groups are done with it
    """
    rows, left_cols, right_cols = rings
    row_scales, left_scale, right_scale = scale_rings
    ROWS: gl.constexpr = rows.shape[1]
    GATHER: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [READERS, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [READERS], [0])
    total = gl.load(tiles + 3)
    count = 0
    expert, first, left, col = _find(tiles, gl.program_id(0), total, COLS, BAND, WORDS)
    own = _source(order, first, left, ROWS, TOP_K, FLAT)
    if TOP_K > 0:
        source = _source(order, first, left, ROWS, TOP_K, gl.SliceLayout(1, GATHER))
    for work in range(gl.program_id(0), total * COLS, gl.num_programs(0)):
        one, two = _blocks(expert, col, N, K, GATED)
        begin = first
        own_at = x_scales + own
        one_at = w_scales + (one * (K // 128) + gl.arange(0, 1, FLAT))
        two_at = w_scales + (two * (K // 128) + gl.arange(0, 1, FLAT))
        if TOP_K > 0:
            at = x + source.to(gl.int64)[:, None] * stride + gl.arange(0, 128, gl.SliceLayout(0, GATHER))[None, :]
        upcoming = gl.minimum(work + gl.num_programs(0), total * COLS - 1)
        expert, first, left, col = _find(tiles, upcoming, total, COLS, BAND, WORDS)
        own = _source(order, first, left, ROWS, TOP_K, FLAT)
        if TOP_K > 0:
            source = _source(order, first, left, ROWS, TOP_K, gl.SliceLayout(1, GATHER))
        for group in range(K // 128):
            stage, phase = count % STAGES, (count // STAGES) & 1
            bar = ready.index(stage)
            mbarrier.wait(free.index(stage), phase ^ 1)
            if TOP_K > 0:
                mbarrier.expect(bar, 2 * weight.block_type.nbytes)
                async_copy.async_copy_global_to_shared(rows.index(stage), at + group * 128)
            else:
                mbarrier.expect(bar, 2 * weight.block_type.nbytes + x.block_type.nbytes)
                tma.async_copy_global_to_shared(x, [begin, group * 128], bar, rows.index(stage))
            tma.async_copy_global_to_shared(weight, [one * 128, group * 128], bar, left_cols.index(stage))
            tma.async_copy_global_to_shared(weight, [two * 128, group * 128], bar, right_cols.index(stage))
            async_copy.async_copy_global_to_shared(row_scales.index(stage), own_at + group * stride_s)
            async_copy.async_copy_global_to_shared(left_scale.index(stage), one_at + group)
            async_copy.async_copy_global_to_shared(right_scale.index(stage), two_at + group)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            count += 1


@gluon_jit
def _begin(given, block, stage, SUMS: gl.constexpr):
    """Start the products [64, 128] of 64 rows with a block of weights."""
    return warpgroup_mma(
        given, block.index(stage).permute((1, 0)), gl.zeros([64, 128], gl.float32, SUMS), use_acc=False, is_async=True
    )


@gluon_jit
def _rounded(values):
    """Round float32 values to bf16. One `cvt` instruction rounds two; rounding one at a time takes 16 times as long."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 two; cvt.rn.bf16x2.f32 two, $3, $2; shl.b32 $0, two, 16; and.b32 $1, two, 0xFFFF0000; }",
        "=r,=r,r,r",
        [values],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon_jit
def _scale_of(values, POWERS: gl.constexpr):
    """Return the scales [64] of the rows of values [64, 128]. See `quantize.triton.scale_of`."""
    words = values.to(gl.int32, bitcast=True) & 0x7FFFFFFF  # in which NaN is the largest
    scale = gl.div_rn(gl.maximum(gl.max(words, 1), 0x2EDBE6FF).to(gl.float32, bitcast=True), 448.0)
    if POWERS:
        bits = scale.to(gl.int32, bitcast=True)
        scale = gl.where(bits < 0x7F800000, (bits + 0x7FFFFF) & 0x7F800000, bits).to(gl.float32, bitcast=True)
    return scale


@gluon_jit
def _narrow(values, scale):
    """Return values / scale, rounded as a division, in e4m3. The scale is that of the values: none exceeds 448."""
    inverse = gl.div_rn(1.0, scale)[:, None]
    quotient = values * inverse
    quotient = gl.fma(
        gl.fma(-quotient, scale[:, None] + gl.zeros_like(values), values), inverse + gl.zeros_like(values), quotient
    )
    return quotient.to(gl.float8e4nv)


@gluon_jit
def _scales(scale_rings, stage, HALF: gl.constexpr, SUMS: gl.constexpr):
    """Return the scales [64, 1] of products of a group's rows with the first and second block of weights."""
    row_scales, left_scale, right_scale = scale_rings
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    own = row_scales.index(stage).slice(HALF * 64, 64).load(ROW)
    left = left_scale.index(stage).load(ROW)
    right = right_scale.index(stage).load(ROW)
    return (own * left)[:, None], (own * right)[:, None]


@gluon_jit
def _given(rows, stage, HALF: gl.constexpr, TOP_K: gl.constexpr):
    """Return a group's 64 rows of a stage as an operand."""
    given = rows.index(stage).slice(HALF * 64, 64)
    if TOP_K > 0:
        hopper.fence_async_shared()  # the gathered rows were not written by the copy engine
    return given


@gluon_jit
def _sum(
    rings,
    scale_rings,
    ready,
    free,
    count,
    HALF: gl.constexpr,
    TOP_K: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    SUMS: gl.constexpr,
):
    """Return the sums [64, 128] of both blocks. A group waits for a block, and adds it while the other group's runs."""
    rows, left_cols, right_cols = rings
    one = gl.zeros([64, 128], gl.float32, SUMS)
    two = gl.zeros([64, 128], gl.float32, SUMS)
    for group in range(K // 128):
        stage = (count + group) % STAGES
        mbarrier.wait(ready.index(stage), ((count + group) // STAGES) & 1)
        given = _given(rows, stage, HALF, TOP_K)
        raw = _begin(given, left_cols, stage, SUMS)
        left, right = _scales(scale_rings, stage, HALF, SUMS)
        raw = warpgroup_mma_wait(0, deps=(raw,))
        one += raw * left
        raw = _begin(given, right_cols, stage, SUMS)
        raw = warpgroup_mma_wait(0, deps=(raw,))
        mbarrier.arrive(free.index(stage))
        two += raw * right
    return one, two


@gluon_jit
def _multiply(
    order,
    tiles,
    routing,
    y,
    y_scales,
    rings,
    scale_rings,
    outs,
    ready,
    free,
    stride_y,
    HALF: gl.constexpr,
    TOP_K: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    ACT: gl.constexpr,
    POWERS: gl.constexpr,
    COLS: gl.constexpr,
    BAND: gl.constexpr,
    STAGES: gl.constexpr,
    WORDS: gl.constexpr,
):
    """A computing group of four warps: the first (HALF 0) or second 64 rows of every tile.

    Arguments as in `_scaled_kernel` and `_read`; outs: buffers of results, one per group.
    """
    GATED: gl.constexpr = ACT != ""
    rows, _left_cols, _right_cols = rings
    out = outs.index(HALF)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    EACH: gl.constexpr = 128 // y.dtype.element_ty.primitive_bitwidth
    STORE: gl.constexpr = gl.BlockedLayout([1, EACH], [EACH // 4, 128 // EACH], [4, 1], [1, 0])
    total = gl.load(tiles + 3)
    count = 0
    _expert, first, left, col = _find(tiles, gl.program_id(0), total, COLS, BAND, WORDS)
    for work in range(gl.program_id(0), total * COLS, gl.num_programs(0)):
        upcoming = gl.minimum(work + gl.num_programs(0), total * COLS - 1)  # read meanwhile
        _expert, next_first, next_left, next_col = _find(tiles, upcoming, total, COLS, BAND, WORDS)
        if left > HALF * 64:
            place = first + gl.minimum(HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, STORE)), left - 1)
            lane = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
            if not GATED:
                place = gl.load(order + place)
                routed = gl.load(routing + gl.load(order + first + gl.minimum(lane, left - 1)))[:, None]
            one, two = _sum(rings, scale_rings, ready, free, count, HALF, TOP_K, K, STAGES, SUMS)
            count += K // 128
            if GATED:
                values = _rounded(gated_in_gluon(one, two, ACT))
                scale = _scale_of(values, POWERS)
                gl.store(y_scales + col * stride_y + first + lane, scale, mask=lane < left)
                _write(y, _narrow(values, scale), out, place, col * 128, left, HALF, N, STORE)
            else:
                _write(y, one * routed, out, place, col * 256, left, HALF, N, STORE)
                _write(y, two * routed, out, place, col * 256 + 128, left, HALF, N, STORE)
        else:
            for _group in range(K // 128):
                mbarrier.wait(ready.index(count % STAGES), (count // STAGES) & 1)
                mbarrier.arrive(free.index(count % STAGES))
                count += 1
        first, left, col = next_first, next_left, next_col


@gluon_jit
def _scaled_kernel(
    x,
    x_scales,
    weight,
    w_scales,
    order,
    tiles,
    routing,
    y,
    y_scales,
    stride,
    stride_s,
    stride_y,
    TOP_K: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    ACT: gl.constexpr,
    POWERS: gl.constexpr,
    COLS: gl.constexpr,
    BAND: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    WORDS: gl.constexpr,
    COMPUTING: gl.constexpr,
    READING: gl.constexpr,
    READERS: gl.constexpr,
):
    """Grid: as many programs as multiprocessors. 4 warps, 168 registers per thread (redistributed inside).

    x                  if TOP_K: e4m3 [R, K] by token, with TOP_K pairs each; stride  elements from row to row
                       if TOP_K is 0: descriptor of rows [pairs, K] in sorted order, in tiles [ROWS, 128]
    x_scales           float32 [K / 128, rows of x]; stride_s  elements from group to group
    weight             descriptor of all experts' weights as rows [R, K] e4m3, in tiles [128, 128]
    w_scales           float32 [experts, 2 N / 128 if GATED else N / 128, K / 128]
    order, tiles       [pairs] int32, see `triton._sort`; [most, WORDS] int32, see `hopper._tiles_kernel`
    routing            [T, k] float32 routing weights, None if GATED
    y                  [pairs, N], output: e4m3 activation in sorted order if GATED, else weighted results by pair
    y_scales           float32 [N / 128, pairs], output: scales of y if GATED; stride_y  elements from group to group
    POWERS             scales of y are powers of two
    N, K               outputs and inputs of an expert;  COLS, BAND  tiles of columns; tiles of pairs side by side
    ROWS, STAGES .. READERS   pairs of a tile; see `Form`
    ACT                see `gated_of`, of the products that are GATED; "": of down
    """
    GATED: gl.constexpr = ACT != ""
    TYPE: gl.constexpr = weight.dtype
    ring: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, 128], TYPE)
    rows = gl.allocate_shared_memory(TYPE, [STAGES, ROWS, 128], ring)
    left_cols = gl.allocate_shared_memory(TYPE, [STAGES, 128, 128], weight.layout)
    right_cols = gl.allocate_shared_memory(TYPE, [STAGES, 128, 128], weight.layout)
    RESULT: gl.constexpr = y.dtype.element_ty
    buffer: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], RESULT)
    outs = gl.allocate_shared_memory(RESULT, [2, 64, 128], buffer)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    row_scales = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], flat)
    left_scale = gl.allocate_shared_memory(gl.float32, [STAGES, 1], flat)
    right_scale = gl.allocate_shared_memory(gl.float32, [STAGES, 1], flat)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1 + 32 * READERS)  # the copy engine, and every thread that copies
        mbarrier.init(free.index(i), count=2)  # both groups
    rings, scale_rings = (rows, left_cols, right_cols), (row_scales, left_scale, right_scale)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    order,
                    tiles,
                    routing,
                    y,
                    y_scales,
                    rings,
                    scale_rings,
                    outs,
                    ready,
                    free,
                    stride_y,
                    0,
                    TOP_K,
                    N,
                    K,
                    ACT,
                    POWERS,
                    COLS,
                    BAND,
                    STAGES,
                    WORDS,
                ),
            ),
            (
                _multiply,
                (
                    order,
                    tiles,
                    routing,
                    y,
                    y_scales,
                    rings,
                    scale_rings,
                    outs,
                    ready,
                    free,
                    stride_y,
                    1,
                    TOP_K,
                    N,
                    K,
                    ACT,
                    POWERS,
                    COLS,
                    BAND,
                    STAGES,
                    WORDS,
                ),
            ),
            (
                _read,
                (
                    x,
                    x_scales,
                    weight,
                    w_scales,
                    order,
                    tiles,
                    rings,
                    scale_rings,
                    ready,
                    free,
                    stride,
                    stride_s,
                    TOP_K,
                    N,
                    K,
                    GATED,
                    COLS,
                    BAND,
                    STAGES,
                    WORDS,
                    READERS,
                ),
            ),
        ],
        [4, READERS],
        [COMPUTING, READING],
    )
