"""Products of up to 64 quantized rows with an 8-bit weight on Hopper (compute capability 9.0): scaled_some.py in Gluon.

The copy engine (TMA) reads weights, rows of x and their scales into a ring in shared memory. It reads weights before
the kernel that writes x has ended. The weights are the tall operand of the tensor cores, so rows are padded to 8 only.
Tensor cores add e4m3 products with 14 bits, so every 128 inputs their sum is multiplied by its scales and added to a
sum in float32, while the next product runs. Parts of K go to several programs; the last of them adds up the sums in
order. Floor: the bytes of the weight over 4.3 TB/s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.attention.hopper import describe
from quire.kernels.linear.epilogue import Epilogue, finish_in_gluon
from quire.kernels.linear.gemv import bucket
from quire.kernels.linear.scaled_weight import Scaled
from quire.kernels.triton_runtime import descriptors, gl, gluon_jit, hopper, tl

if hopper is not None:
    mbarrier, tma = hopper.mbarrier, hopper.tma
    warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait

MOST_ROWS = 64
GROUP = 128  # inputs that share a scale
LINES = 8  # groups whose scales the copy engine reads at once
SHARED = 108 << 10  # bytes of shared memory of one of two programs


@dataclass(frozen=True)
class Tiles:
    """The tiling of a program.

    rows     rows of x, padded to a power of two: 8 to 64
    tall     blocks of 16 * warps outputs (of gate and as many of up, if gated)
    depth    groups of 128 inputs of an iteration: 1 or 2
    stages   iterations in the ring
    split    parts of K that programs multiply side by side, none of them empty
    warps    4 or 8. tall * warps is 4 or 8

    Registers do not suffice for 64 rows and two blocks of gate and up.
    """

    rows: int
    tall: int
    depth: int
    stages: int
    split: int = 1
    warps: int = 4

    @property
    def cols(self) -> int:
        """Outputs of a program, of gate and as many of up if gated."""
        return 16 * self.warps * self.tall


def tiles_of(rows: int, n: int, k: int, gated: bool, block: int) -> Tiles:
    """Return the tiling for `rows` rows, n outputs (of gate and n of up, if gated) and k inputs.

    Measured for the products of an 8B model. A multiprocessor runs one program if all of them fit at once, else two.
    """
    size, groups, wide = max(8, bucket(rows)), -(-k // GROUP), -(-n // 64)
    if gated and size == 8 and block != 1 and groups >= 16:
        return Tiles(size, 1, 2, 2, 2)
    cols, depth = 64 << gated, 1 if gated else 2
    kept = 4 * (size + (cols if block == 1 else 0)) if block else 0  # bytes of the scales of a group
    most = k // (4096 if wide >= 64 else 1024)  # parts so small that adding them up costs more than it saves
    split = max(1, min(most, 132 // wide), -(-groups * kept // (40 << 10)))
    room = (2 * SHARED if wide * split <= 132 else SHARED) - (groups // split + 2 * LINES) * kept
    return Tiles(size, 1, depth, max(2, min(12, room // (depth * GROUP * (size + cols)))), split)


def product(q: Tensor, x_scales: Tensor, packed: Scaled, into: Epilogue) -> Tensor:
    """Multiply T rows of q [R, K], at most MOST_ROWS, with the weight; return `into.y`.

    Arguments as those of `scaled_some.product`. The copy engine reads scales of blocks of one output as [K / 128, N].
    """
    weight, block, (y, bias, act, residual), gated = packed.values, packed.block, into, into.gated
    scales = packed.wide if block == 1 else packed.scales
    rows, n, k = y.shape[0], weight.shape[0] >> gated, weight.shape[1]
    tiles = tiles_of(rows, n, k, gated, block)
    in_pdl = pdl.in_use()
    cols, wide = tiles.cols, -(-n // tiles.cols)
    parts = None
    if tiles.split > 1:
        parts = y.new_empty(wide * tiles.split * cols * tiles.rows << gated, dtype=torch.float32)
    deep = GROUP * tiles.depth
    steps = -(-k // deep)
    share = -(-steps // tiles.split) * tiles.depth
    _some_kernel[(wide, tiles.split)](
        describe(q, [tiles.rows, deep]),
        _lines(x_scales, tiles.rows) if block else x_scales,
        describe(weight, [cols, deep]),
        _lines(scales, cols) if block == 1 else scales,
        bias,
        residual,
        y,
        parts,
        packed.counters,
        rows,
        n,
        K=k,
        M=tiles.rows,
        TALL=tiles.tall,
        DEPTH=tiles.depth,
        BLOCK=block,
        FIXED=x_scales.numel() == 1,
        ACT=act,
        STAGES=tiles.stages,
        SPLIT=tiles.split,
        ROOM=bucket(share),
        WARPS=tiles.warps,
        PDL=in_pdl,
        num_warps=tiles.warps,
        **pdl.options(in_pdl),
    )
    return y


def _lines(scales: Tensor, width: int) -> object:
    """Return a descriptor of scales [groups, R or N] for the copy engine, in tiles [LINES, width]."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    lines, size = scales.shape
    stride = scales.stride(0) if lines > 1 else -(-size // 4) * 4  # PyTorch gives a single line any stride
    return descriptors.TensorDescriptor(scales, [lines, size], [stride, scales.stride(1)], [LINES, width], layout)


@gluon_jit
def _read_weights(weight, ring, bar, stage, col, n, step, pred, BYTES: gl.constexpr, HALVES: gl.constexpr):
    """Let the copy engine read the weights of an iteration.

    col     first output;  step  number of the iteration
    BYTES   all bytes that the barrier will wait for
    """
    mbarrier.expect(bar, BYTES, pred=pred)
    deep = step * weight.block_type.shape[1]
    for half in gl.static_range(HALVES):
        tma.async_copy_global_to_shared(
            weight, [col + half * n, deep], bar, ring.index(stage * HALVES + half), pred=pred
        )


@gluon_jit
def _read_lines(scales, kept, bar, first, col):
    """Let the copy engine read the scales of the program's groups to the buffers `kept` [.., LINES, width].

    first, col   the first group; the first row of x or output
    """
    CHUNKS: gl.constexpr = kept.shape[0]
    for chunk in gl.static_range(CHUNKS):
        tma.async_copy_global_to_shared(scales, [first + chunk * kept.shape[1], col], bar, kept.index(chunk))


@gluon_jit
def _scales_of(scales, line, first, GROUPS: gl.constexpr, ROOM: gl.constexpr, WARPS: gl.constexpr):
    """Start to load the scales of a block of 128 outputs, number `line`, of ROOM groups from the group `first` on."""
    group = first + gl.arange(0, ROOM, gl.BlockedLayout([1], [32], [WARPS], [0]))
    return gl.load(scales + line * GROUPS + gl.minimum(group, GROUPS - 1))


@gluon_jit
def _line(kept, group):
    """Return the buffer [1, width] of a group's scales."""
    WIDTH: gl.constexpr = kept.shape[2]
    return kept._reinterpret(gl.float32, [kept.shape[0] * kept.shape[1], 1, WIDTH], kept.layout).index(group)


@gluon_jit
def _begin(
    rings,
    kept,
    stage,
    turn,
    piece: gl.constexpr,
    TALL: gl.constexpr,
    DEPTH: gl.constexpr,
    BLOCK: gl.constexpr,
    HALVES: gl.constexpr,
    SUM: gl.constexpr,
    ACC: gl.constexpr,
):
    """Start the product number `piece` of an iteration: return its sums [HIGH, M], and their scales [1 or HIGH, M]."""
    HIGH: gl.constexpr = 16 * ACC.warps_per_cta[0]
    half: gl.constexpr = piece % (TALL * HALVES) // TALL
    tall: gl.constexpr = piece % TALL * HIGH
    group: gl.constexpr = piece // (TALL * HALVES)
    M: gl.constexpr = rings[1].shape[1]
    left = rings[0].index(stage * HALVES + half).slice(tall, HIGH).slice(group * 128, 128, dim=1)
    right = rings[1].index(stage).slice(group * 128, 128, dim=1).permute((1, 0))
    raw = warpgroup_mma(left, right, gl.zeros([HIGH, M], SUM, ACC), use_acc=False, is_async=True)
    at = turn * DEPTH + group
    if BLOCK == 0:
        factor = gl.zeros([1, M], gl.float32, ACC)
    elif BLOCK == 1:
        theirs = _line(kept[1 + half], at).slice(tall, HIGH, dim=1).permute((1, 0))
        factor = _line(kept[0], at).load(ACC) * theirs.load(ACC)
    else:
        factor = _line(kept[0], at).load(ACC) * kept[1 + half].index(at).load(gl.SliceLayout(0, ACC))[None, :]
    return raw, factor


@gluon_jit
def _add(sums, at: gl.constexpr, raw, factor, BLOCKS: gl.constexpr, BLOCK: gl.constexpr):
    """Return the tuple of sums with raw * factor added to the sum number `at`."""
    found = ()
    for i in gl.static_range(BLOCKS):
        if i != at:
            found = found + (sums[i],)
        elif BLOCK:
            found = found + (sums[i] + raw * factor,)
        else:
            found = found + (sums[i] + raw,)
    return found


@gluon_jit
def _sum(parts, SPLIT: gl.constexpr, BLOCKS: gl.constexpr, M: gl.constexpr, ACC: gl.constexpr):
    """Return the sums of all parts of K, in order. parts: pointers [HIGH, M] to those of the first part and block."""
    HIGH: gl.constexpr = parts.shape[0]
    MOST: gl.constexpr = 256 // (M * BLOCKS) if M * BLOCKS < 256 else 1
    ONCE: gl.constexpr = SPLIT if SPLIT < MOST else MOST  # parts that are loaded at once
    total = ()
    for _ in gl.static_range(BLOCKS):
        total = total + (gl.zeros([HIGH, M], gl.float32, ACC),)
    for start in range(0, gl.num_programs(1), ONCE):  # a constant bound would be unrolled, and registers spilled
        for more in gl.static_range(ONCE):
            upcoming = ()
            for i in gl.static_range(BLOCKS):
                at = parts + ((start + more) * BLOCKS + i) * (HIGH * M)
                if SPLIT % ONCE == 0:
                    upcoming = upcoming + (total[i] + gl.load(at, cache_modifier=".cg"),)
                else:
                    part = gl.load(at, mask=start + more < SPLIT, other=0.0, cache_modifier=".cg")
                    upcoming = upcoming + (total[i] + part,)
            total = upcoming
    return total


@gluon_jit
def _finish(
    out,
    other,
    x_scales,
    scales,
    bias,
    residual,
    y,
    first,
    rows,
    n,
    BLOCK: gl.constexpr,
    FIXED: gl.constexpr,
    ACT: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Apply scales of channels, bias, gate and residual to sums [HIGH, M], and store the result.

    out, other   of gate and up if GATED, else `other` is not used;  first  the first output
    """
    GATED: gl.constexpr = ACT != ""
    HIGH: gl.constexpr = out.shape[0]
    M: gl.constexpr = out.shape[1]
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [HIGH // 8, 256 // HIGH], [1, WARPS], [0, 1])
    out = gl.convert_layout(out, OUT).to(gl.float32)
    if GATED:
        other = gl.convert_layout(other, OUT).to(gl.float32)
    col = first + gl.arange(0, HIGH, gl.SliceLayout(1, OUT))
    row = gl.arange(0, M, gl.SliceLayout(0, OUT))
    if BLOCK == 0:
        own = gl.load(x_scales + (row * 0 if FIXED else row), mask=row < rows, other=0.0)[None, :]
        out *= gl.load(scales + col, mask=col < n, other=0.0)[:, None] * own
        if GATED:
            other *= gl.load(scales + n + col, mask=col < n, other=0.0)[:, None] * own
    finish_in_gluon(out, other, bias, residual, y, row, col, rows, n, ACT)


@gluon_jit(do_not_specialize=["rows"])
def _some_kernel(
    x,
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
    K: gl.constexpr,
    M: gl.constexpr,
    TALL: gl.constexpr,
    DEPTH: gl.constexpr,
    BLOCK: gl.constexpr,
    FIXED: gl.constexpr,
    ACT: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    ROOM: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """COLS = 16 WARPS TALL outputs of up to M rows, from a part of K. Grid (ceil(n / COLS), SPLIT), WARPS warps.

    x                  descriptor of [R, K] e4m3 or int8 in tiles [M, 128 DEPTH]
    x_scales           descriptor of [K / 128, R] float32 in tiles [8, M] if BLOCK; else [rows], one number if FIXED
    weight             descriptor of [n, K] of x's type in tiles [COLS, 128 DEPTH]; if GATED [2 n, K], gate first
    scales             float32: [ceil(n / 128), K / 128] if BLOCK is 128; descriptor of [K / 128, n] in tiles
                       [8, COLS] if it is 1; [n] if it is 0; for 2 n outputs if GATED
    bias, residual, y  as in `gemv._few_kernel`
    parts              [tiles, SPLIT, COLS, M] float32, twice if GATED: sums of parts of K; None if SPLIT is 1
    counters           [tiles] int32, zeros: programs of an output tile that have ended; left as zeros
    DEPTH, STAGES      see `Tiles`
    ROOM               most groups of 128 inputs of a program, padded to a power of two
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    HALVES: gl.constexpr = 1 if ACT == "" else 2
    HIGH: gl.constexpr = 16 * WARPS
    COLS: gl.constexpr = HIGH * TALL
    BLOCKS: gl.constexpr = TALL * HALVES
    PIECES: gl.constexpr = BLOCKS * DEPTH  # products of an iteration
    GROUPS: gl.constexpr = K // 128
    STEPS: gl.constexpr = (GROUPS + DEPTH - 1) // DEPTH
    SUM: gl.constexpr = gl.int32 if x.dtype == gl.int8 else gl.float32
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, M, 32])
    SHARE: gl.constexpr = (STEPS + SPLIT - 1) // SPLIT * DEPTH  # most groups of a program
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES * HALVES, COLS, 128 * DEPTH], weight.layout)
    given = gl.allocate_shared_memory(x.dtype, [STAGES, M, 128 * DEPTH], x.layout)
    rings = (weights, given)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(STAGES):
        mbarrier.init(ready.index(early), count=1)
    hopper.fence_async_shared()
    tile = gl.program_id(0)
    col = tile * COLS
    first = gl.program_id(1) * STEPS // SPLIT
    count = (gl.program_id(1) + 1) * STEPS // SPLIT - first
    gl.assume(count > 0)  # else ptxas would wait for every product
    BYTES: gl.constexpr = HALVES * weight.block_type.nbytes + x.block_type.nbytes
    LINES: gl.constexpr = x_scales.block_type.shape[0] if BLOCK else 1
    CHUNKS: gl.constexpr = (SHARE + LINES - 1) // LINES
    MORE: gl.constexpr = CHUNKS * LINES * 4 * (M + (HALVES * COLS if BLOCK == 1 else 0)) if BLOCK else 0
    for early in gl.static_range(STAGES):
        _read_weights(
            weight,
            weights,
            ready.index(early),
            early,
            col,
            n,
            first + early,
            early < count,
            BYTES + (MORE if early == 0 else 0),
            HALVES,
        )
    kept = ()
    if BLOCK:
        kept = (gl.allocate_shared_memory(gl.float32, [CHUNKS, LINES, M], x_scales.layout),)
    if BLOCK == 1:
        for half in gl.static_range(HALVES):
            theirs = gl.allocate_shared_memory(gl.float32, [CHUNKS, LINES, COLS], scales.layout)
            _read_lines(scales, theirs, ready.index(0), first * DEPTH, col + half * n)
            kept = kept + (theirs,)
    if BLOCK == 128:
        loaded = ()
        for half in gl.static_range(HALVES):
            loaded = loaded + (_scales_of(scales, (col + half * n) // 128, first * DEPTH, GROUPS, ROOM, WARPS),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for early in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            x, [0, (first + early) * (128 * DEPTH)], ready.index(early), given.index(early), pred=early < count
        )
        if BLOCK and early == 0:
            _read_lines(x_scales, kept[0], ready.index(0), first * DEPTH, 0)
    if BLOCK == 128:
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        for half in gl.static_range(HALVES):
            theirs = gl.allocate_shared_memory(gl.float32, [ROOM, 1], FLAT)
            theirs._reinterpret(gl.float32, [ROOM], FLAT).store(loaded[half])
            kept = kept + (theirs,)
    sums = ()
    for _ in gl.static_range(BLOCKS):
        sums = sums + (gl.zeros([HIGH, M], SUM, ACC),)
    for turn in range(count):
        stage = turn % STAGES
        bar = ready.index(stage)
        mbarrier.wait(bar, (turn // STAGES) & 1)
        running, before = _begin(rings, kept, stage, turn, 0, TALL, DEPTH, BLOCK, HALVES, SUM, ACC)
        for piece in gl.static_range(1, PIECES):
            upcoming, factor = _begin(rings, kept, stage, turn, piece, TALL, DEPTH, BLOCK, HALVES, SUM, ACC)
            done = warpgroup_mma_wait(1, deps=(running,))
            sums = _add(sums, (piece - 1) % BLOCKS, done, before, BLOCKS, BLOCK)
            running, before = upcoming, factor
        done = warpgroup_mma_wait(0, deps=(running,))
        gl.thread_barrier()  # no warp reads the iteration any more
        later = turn + STAGES
        _read_weights(weight, weights, bar, stage, col, n, first + later, later < count, BYTES, HALVES)
        tma.async_copy_global_to_shared(
            x, [0, (first + later) * (128 * DEPTH)], bar, given.index(stage), pred=later < count
        )
        sums = _add(sums, (PIECES - 1) % BLOCKS, done, before, BLOCKS, BLOCK)
    if SPLIT > 1:
        SIZE: gl.constexpr = HIGH * M
        lane = gl.arange(0, HIGH, gl.SliceLayout(1, ACC))[:, None] * M
        mine = parts + tile * (SPLIT * BLOCKS * SIZE) + lane + gl.arange(0, M, gl.SliceLayout(0, ACC))[None, :]
        for i in gl.static_range(BLOCKS):
            gl.store(mine + (gl.program_id(1) * BLOCKS + i) * SIZE, sums[i].to(gl.float32))
        gl.thread_barrier()  # all stores of the program come before its tick
        if gl.atomic_add(counters + tile, 1, sem="acq_rel") != SPLIT - 1:
            return
        gl.store(counters + tile, 0)
        total = _sum(mine, SPLIT, BLOCKS, M, ACC)
    else:
        total = sums
    for i in gl.static_range(TALL):
        _finish(
            total[i],
            total[BLOCKS - TALL + i],
            x_scales,
            scales,
            bias,
            residual,
            y,
            col + i * HIGH,
            rows,
            n,
            BLOCK,
            FIXED,
            ACT,
            WARPS,
        )
