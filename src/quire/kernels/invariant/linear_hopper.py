"""Products on Hopper (compute capability 9.0) whose sums have one order; see `linear.py`.

In both kernels the copy engine (TMA) fills a ring of tiles in shared memory. An instruction (wgmma m64nRk16) multiplies
64 outputs by R rows and adds 16 inputs, in the order of the inputs. An output of a row is one element of its result:
another R changes the elements beside it.

    _few_kernel    a group of four warps, 64 outputs, up to 64 rows. It reads weights before the kernel that writes x
                   has ended. Floor: the bytes of the weight over 4.3 TB/s
    _many_kernel   persistent programs, one per multiprocessor: four warps fill the ring, two groups of four warps
                   multiply 64 of 128 outputs each by 128 rows, or by twice as many; if gated, 64 of gate and of up by
                   128 rows. Floor: 2 T N K operations over 780 TFLOP/s
"""

from __future__ import annotations

from torch import Tensor

from quire.kernels import pdl
from quire.kernels.activation.triton import gated_in_gluon
from quire.kernels.attention.hopper import describe
from quire.kernels.attention.triton_plan import multiprocessors
from quire.kernels.linear.gemv import bucket
from quire.kernels.linear.scaled_hopper import _read_weights
from quire.kernels.linear.some_hopper import readable
from quire.kernels.triton_runtime import gl, gluon_jit, hopper, missing_hopper, tl

if hopper is not None:
    mbarrier, tma = hopper.mbarrier, hopper.tma
    warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait

MOST_FEW = 64  # rows of _few_kernel
COLS = 64  # outputs that a group of four warps multiplies
DEEP = 128  # inputs of an iteration; half as many where a group of _many_kernel has two blocks of sums
HIGH = 128  # rows of a block of sums of _many_kernel
SHARED = 224 << 10  # bytes of shared memory of a program
WIDE = 1024  # from so many rows on, a tile of _many_kernel has 256 rows, if registers hold the sums
BAND = 16  # tiles of rows that run side by side through the same outputs


def runs(weight: Tensor) -> bool:
    """Return True if the kernels can run, and can read a weight: of a two-byte type, with rows of whole 16 bytes."""
    aligned = weight.element_size() == 2 and weight.shape[1] % 8 == 0
    return aligned and gl is not None and not (weight.is_cuda and missing_hopper())


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, *, residual: Tensor | None = None, act: str = ""
) -> Tensor:
    """Multiply x [T, K] with weight [N, K] into y [T, N]; returns y. Arguments as in `linear._product`."""
    x, gated, rows = readable(x), act != "", len(x)
    n, k = weight.shape[0] >> gated, weight.shape[1]
    if rows <= MOST_FEW:
        high, in_pdl = max(8, bucket(rows)), pdl.in_use()
        stages = max(2, min(12, -(-k // DEEP), SHARED // (2 * DEEP * (high + (COLS << gated)))))
        _few_kernel[(-(-n // COLS),)](
            describe(x, [high, DEEP]),
            describe(weight, [COLS, DEEP]),
            bias,
            residual,
            y,
            rows,
            n,
            K=k,
            ACT=act,
            STAGES=stages,
            PDL=in_pdl,
            num_warps=4,
            enable_fp_fusion=False,
            **pdl.options(in_pdl),
        )
        return y
    high = 2 * HIGH if rows >= WIDE and not gated else HIGH
    deep, tall, wide = DEEP // 2 if gated or high > HIGH else DEEP, -(-rows // high), -(-n // (2 * COLS))
    room = SHARED - 2 * COLS * HIGH * y.element_size()
    stages = max(2, min(6, room // (2 * deep * (high + (2 * COLS << gated)))))
    _many_kernel[(min(multiprocessors(), tall * wide),)](
        describe(x, [high, deep]),
        describe(weight, [2 * COLS, deep]),
        bias,
        residual,
        y,
        rows,
        n,
        tall,
        wide,
        K=k,
        ACT=act,
        STAGES=stages,
        BAND=BAND,
        num_warps=4,
        maxnreg=168,
        enable_fp_fusion=False,
    )
    return y


@gluon_jit
def _store(out, residual, y, row, col, rows, n, LAYOUT: gl.constexpr):
    """Write rounded results [rows, outputs] of the buffer `out` to y, with the residual added, and round again.

    row, col   first row and output;  rows, n  ends of both
    """
    HIGH: gl.constexpr = out.shape[0]
    values = out.load(LAYOUT)
    rows_of = row + gl.arange(0, HIGH, gl.SliceLayout(1, LAYOUT))
    cols = col + gl.arange(0, out.shape[1], gl.SliceLayout(0, LAYOUT))
    at = rows_of.to(gl.int64)[:, None] * n + cols[None, :]
    mask = (rows_of < rows)[:, None] & (cols < n)[None, :]
    if residual is not None:
        added = gl.load(residual + at, mask=mask, other=0.0).to(gl.float32)
        values = (values.to(gl.float32) + added).to(y.dtype.element_ty)
    gl.store(y + at, values, mask=mask)


@gluon_jit
def _result(one, two, bias, col, n, ACT: gl.constexpr):
    """Return sums [outputs, rows] with the bias, or the activation of those of gate and up. col: the first output."""
    if bias is not None:
        cols = col + gl.arange(0, one.shape[0], gl.SliceLayout(1, one.type.layout))
        one += gl.load(bias + cols, mask=cols < n, other=0.0).to(gl.float32)[:, None]
        if ACT != "":
            two += gl.load(bias + n + cols, mask=cols < n, other=0.0).to(gl.float32)[:, None]
    if ACT != "":
        one = gated_in_gluon(one, two, ACT)
    return one


@gluon_jit(do_not_specialize=["rows"])
def _few_kernel(
    x,
    weight,
    bias,
    residual,
    y,
    rows,
    n,
    K: gl.constexpr,
    ACT: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """COLS outputs of up to M rows. Grid (ceil(n / COLS),), 4 warps.

    x                  descriptor of [T, K] in tiles [M, DEEP]
    weight             descriptor of [n, K] in tiles [COLS, DEEP]; with ACT of [2 n, K], gate first
    bias, residual, y  as in `linear._tile_kernel`
    STAGES             iterations in the ring
    """
    GATED: gl.constexpr = ACT != ""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    HALVES: gl.constexpr = 2 if GATED else 1
    M: gl.constexpr = x.block_type.shape[0]
    DEEP: gl.constexpr = x.block_type.shape[1]
    COLS: gl.constexpr = weight.block_type.shape[0]
    STEPS: gl.constexpr = (K + DEEP - 1) // DEEP
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    BYTES: gl.constexpr = HALVES * weight.block_type.nbytes + x.block_type.nbytes
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES * HALVES, COLS, DEEP], weight.layout)
    given = gl.allocate_shared_memory(x.dtype, [STAGES, M, DEEP], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(STAGES):
        mbarrier.init(ready.index(early), count=1)
    hopper.fence_async_shared()
    col = gl.program_id(0) * COLS
    for early in gl.static_range(STAGES):
        _read_weights(weight, weights, ready.index(early), early, col, n, early, early < STEPS, BYTES, HALVES)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for early in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            x, [0, early * DEEP], ready.index(early), given.index(early), pred=early < STEPS
        )
    one = gl.zeros([COLS, M], gl.float32, ACC)
    two = gl.zeros([COLS, M], gl.float32, ACC)  # of up
    for turn in range(STEPS):
        stage = turn % STAGES
        mbarrier.wait(ready.index(stage), (turn // STAGES) & 1)
        right = given.index(stage).permute((1, 0))
        one = warpgroup_mma(weights.index(stage * HALVES), right, one, is_async=True)
        if GATED:
            two = warpgroup_mma(weights.index(stage * HALVES + 1), right, two, is_async=True)
            one, two = warpgroup_mma_wait(2, deps=(one, two))
        else:
            one = warpgroup_mma_wait(1, deps=(one,))
        gl.thread_barrier()  # no warp reads the iteration before any more
        done, later = (turn + STAGES - 1) % STAGES, turn + STAGES - 1
        again = (turn > 0) & (later < STEPS)
        _read_weights(weight, weights, ready.index(done), done, col, n, later, again, BYTES, HALVES)
        tma.async_copy_global_to_shared(x, [0, later * DEEP], ready.index(done), given.index(done), pred=again)
    if GATED:
        one, two = warpgroup_mma_wait(0, deps=(one, two))
    else:
        one = warpgroup_mma_wait(0, deps=(one,))
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [COLS // 8, 256 // COLS], [1, 4], [0, 1])
    values = gl.convert_layout(_result(one, two, bias, col, n, ACT).to(y.dtype.element_ty), OUT)
    cols = col + gl.arange(0, COLS, gl.SliceLayout(1, OUT))
    row = gl.arange(0, M, gl.SliceLayout(0, OUT))
    at = row[None, :] * n + cols[:, None]
    inside = (cols < n)[:, None] & (row < rows)[None, :]
    if residual is not None:
        added = gl.load(residual + at, mask=inside, other=0.0).to(gl.float32)
        values = (values.to(gl.float32) + added).to(y.dtype.element_ty)
    gl.store(y + at, values, mask=inside)


@gluon_jit
def _place(work, tall, wide, BAND: gl.constexpr):
    """Return the tile of rows and the tile of outputs of a piece of work. BAND tiles of rows share outputs."""
    band = work // (BAND * wide) * BAND
    height = gl.minimum(tall - band, BAND)
    number = work - band * wide
    return band + number % height, number // height


@gluon_jit
def _read(x, weight, rings, bars, n, tall, wide, K: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr):
    """The reading warps. Arguments as in `_many_kernel`.

    rings   buffers [STAGES, ...] in shared memory: rows of x, and weights (of gate, then of up)
    bars    barriers by stage: the copies have written it (ready); both groups are done with it (free)
    """
    given, weights = rings
    ready, free = bars
    HIGH: gl.constexpr = x.block_type.shape[0]
    COLS: gl.constexpr = weight.block_type.shape[0]
    HALVES: gl.constexpr = weights.shape[0] // STAGES
    BYTES: gl.constexpr = HALVES * weight.block_type.nbytes + x.block_type.nbytes
    count = 0
    for work in range(gl.program_id(0), tall * wide, gl.num_programs(0)):
        row, col = _place(work, tall, wide, BAND)
        for start in range(0, K, x.block_type.shape[1]):
            stage, phase = count % STAGES, (count // STAGES) & 1
            bar = ready.index(stage)
            mbarrier.wait(free.index(stage), phase ^ 1)
            mbarrier.expect(bar, BYTES)
            tma.async_copy_global_to_shared(x, [row * HIGH, start], bar, given.index(stage))
            for half in gl.static_range(HALVES):
                tma.async_copy_global_to_shared(
                    weight, [col * COLS + half * n, start], bar, weights.index(stage * HALVES + half)
                )
            count += 1


@gluon_jit
def _multiply(
    bias,
    residual,
    y,
    rings,
    outs,
    bars,
    rows,
    n,
    tall,
    wide,
    HALF: gl.constexpr,
    K: gl.constexpr,
    ACT: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
):
    """A computing group of four warps: the first (HALF 0) or second 64 outputs of every tile.

    Arguments as in `_many_kernel` and `_read`; outs: buffers of results, one per group.
    """
    given, weights = rings
    ready, free = bars
    out = outs.index(HALF)
    HIGH: gl.constexpr = out.shape[0]
    GATED: gl.constexpr = ACT != ""
    BLOCKS: gl.constexpr = 2 if GATED else given.shape[1] // HIGH  # of sums: gate and up, or of rows
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HIGH, 16])
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    count = 0
    for work in range(gl.program_id(0), tall * wide, gl.num_programs(0)):
        row, tile = _place(work, tall, wide, BAND)
        col = (tile * 2 + HALF) * 64
        one = gl.zeros([64, HIGH], gl.float32, SUMS)
        two = one
        if BLOCKS == 2:
            two = gl.zeros([64, HIGH], gl.float32, SUMS)
        for start in range(0, K, given.shape[2]):
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), (count // STAGES) & 1)
            left = weights.index(stage * (1 + GATED)).slice(HALF * 64, 64)
            right = given.index(stage).slice(0, HIGH).permute((1, 0))
            one = warpgroup_mma(left, right, one, is_async=True)
            if BLOCKS == 2:
                if GATED:
                    left = weights.index(stage * 2 + 1).slice(HALF * 64, 64)
                else:
                    right = given.index(stage).slice(HIGH, HIGH).permute((1, 0))
                two = warpgroup_mma(left, right, two, is_async=True)
                one, two = warpgroup_mma_wait(2, deps=(one, two))
            else:
                one = warpgroup_mma_wait(1, deps=(one,))
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=start > 0)
            count += 1
        if BLOCKS == 2:
            one, two = warpgroup_mma_wait(0, deps=(one, two))
        else:
            one = warpgroup_mma_wait(0, deps=(one,))
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))
        first = row * given.shape[1]
        out.permute((1, 0)).store(_result(one, two, bias, col, n, ACT).to(y.dtype.element_ty))
        for part in gl.static_range(HIGH // 64):
            _store(out.slice(part * 64, 64), residual, y, first + part * 64, col, rows, n, STORE)
        if BLOCKS == 2 and not GATED:
            out.permute((1, 0)).store(_result(two, two, bias, col, n, ACT).to(y.dtype.element_ty))
            for part in gl.static_range(HIGH // 64):
                _store(out.slice(part * 64, 64), residual, y, first + HIGH + part * 64, col, rows, n, STORE)


@gluon_jit(do_not_specialize=["rows", "tall", "wide"])
def _many_kernel(
    x,
    weight,
    bias,
    residual,
    y,
    rows,
    n,
    tall,
    wide,
    K: gl.constexpr,
    ACT: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
):
    """Grid: as many programs as multiprocessors. 4 warps, 168 registers per thread (redistributed inside).

    x                  descriptor of [T, K] in tiles [128 or 256, DEEP]
    weight             descriptor of [n, K] in tiles [128, DEEP]; with ACT of [2 n, K], gate first
    bias, residual, y  as in `linear._tile_kernel`
    tall, wide         tiles of rows, of outputs;  BAND  tiles of rows side by side;  STAGES  iterations in the ring
    """
    HALVES: gl.constexpr = 1 if ACT == "" else 2
    HIGH: gl.constexpr = x.block_type.shape[0]
    DEEP: gl.constexpr = x.block_type.shape[1]
    given = gl.allocate_shared_memory(x.dtype, [STAGES, HIGH, DEEP], x.layout)
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES * HALVES, 128, DEEP], weight.layout)
    buffer: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 64], y.dtype.element_ty)
    outs = gl.allocate_shared_memory(y.dtype.element_ty, [2, 128, 64], buffer)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)  # both groups
    hopper.fence_async_shared()
    rings, bars = (given, weights), (ready, free)
    gl.warp_specialize(
        [
            (_multiply, (bias, residual, y, rings, outs, bars, rows, n, tall, wide, 0, K, ACT, STAGES, BAND)),
            (_multiply, (bias, residual, y, rings, outs, bars, rows, n, tall, wide, 1, K, ACT, STAGES, BAND)),
            (_read, (x, weight, rings, bars, n, tall, wide, K, STAGES, BAND)),
        ],
        [4, 4],
        [208, 88],
    )
