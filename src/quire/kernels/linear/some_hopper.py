"""Products of up to 64 rows with a two-byte weight on Hopper (compute capability 9.0).

The copy engine (TMA) reads weights and rows of x into a ring in shared memory. It reads weights before the kernel that
writes x has ended. The weights are the tall operand of the tensor cores, so rows are padded to 8 only. Sums stay in
registers. Floor: the bytes of the weight over 4.3 TB/s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.attention.hopper import describe
from quire.kernels.linear.gemv import bucket
from quire.kernels.linear.scaled_hopper import MOST_ROWS, _finish, _read_weights
from quire.kernels.triton_runtime import gl, gluon_jit, hopper, tl

if hopper is not None:
    mbarrier, tma = hopper.mbarrier, hopper.tma
    warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait

__all__ = ["MOST_ROWS", "Tiles", "product", "readable"]

SHARED = 224 << 10  # bytes of shared memory of a program
COLS = 64  # outputs of a program, of gate and as many of up if gated


@dataclass(frozen=True)
class Tiles:
    """The tiling of a program.

    rows     rows of x, padded to a power of two: 8 to 64
    deep     inputs of an iteration
    stages   iterations in the ring
    """

    rows: int
    deep: int
    stages: int


def tiles_of(rows: int, k: int, gated: bool) -> Tiles:
    """Return the tiling for `rows` rows and k inputs. gated: the weight has rows of gate and of up.

    The rules give the best of 8 to 14 tilings, measured for the products of Qwen3 0.6B, 8B and 30B (docs/log.md). A
    multiprocessor runs one program at a time: two are slower, and so are programs of 128 outputs.
    """
    size = max(8, bucket(rows))
    deep, most = (256, 6) if size <= 16 else (128, 9 if size == 32 else 6)
    width = size + (COLS << gated)
    return Tiles(size, deep, max(2, min(most, -(-k // deep), SHARED // (2 * deep * width))))


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    *,
    residual: Tensor | None = None,
    act: str = "",
) -> Tensor:
    """Multiply x [T, K] of at most MOST_ROWS rows with weight [N, K] into y [T, N]; returns y.

    K is a multiple of 8. Other arguments as in `gemv.product`.
    """
    gated = act != ""
    rows, n, k = y.shape[0], weight.shape[0] >> gated, weight.shape[1]
    x = readable(x)
    tiles = tiles_of(rows, k, gated)
    in_pdl = pdl.in_use()
    _some_kernel[(-(-n // COLS),)](
        describe(x, [tiles.rows, tiles.deep]),
        describe(weight, [COLS, tiles.deep]),
        bias,
        residual,
        y,
        rows,
        n,
        K=k,
        ACT=act,
        STAGES=tiles.stages,
        PDL=in_pdl,
        num_warps=4,
        **pdl.options(in_pdl),
    )
    return y


def readable(x: Tensor) -> Tensor:
    """Return x [T, K] of a two-byte type, or a copy of it, as the copy engine reads it: rows begin at 16 bytes."""
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x


@gluon_jit(do_not_specialize=["rows"])
def _some_kernel(
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
    weight             descriptor of [n, K] in tiles [COLS, DEEP]; if GATED [2 n, K], gate first
    bias, residual, y  as in `gemv._few_kernel`
    STAGES             see `Tiles`
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
    _finish(one, two, None, None, bias, residual, y, col, rows, n, 1, False, ACT, 4)
