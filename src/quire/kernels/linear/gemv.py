"""Linear layers of few rows: the weight is read once; norm, bias, gate and residual are fused into the product.

Two kernels, for up to 4 rows and for 8 to 64 (the number of rows is rounded up to a power of two):

_few_kernel    float32 arithmetic without tensor cores. A program owns BLOCK_N outputs and loops over all of K; it loads
               the next tile of weights while it computes with the current one. A thread adds 8 neighbours at once, so
               it keeps one sum per row and output. Threads add their sums once, at the end.
_some_kernel   Tensor cores, with the weights as the tall operand, so that rows are padded to 8 only. With SPLIT > 1
               each warp takes a part of K, so that a weight with few outputs, too, makes many programs of many warps.

The order of additions depends on the shapes, never on time. With `norm` the input is multiplied by the norm's weight
before the product, and the product by 1 / rms: every program adds up the squares of its own copy of the input.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.kernels import pdl
from quire.kernels.linear.epilogue import finish
from quire.kernels.triton_runtime import jit, tl

MOST_FEW = 4  # rows of _few_kernel
MOST_ROWS = 64


@dataclass(frozen=True)
class Tiles:
    """The tiling of a program.

    block_n   outputs of a program
    block_k   inputs of an iteration
    stages    iterations in flight (num_stages of Triton), for more than MOST_FEW (4) rows only
    split     parts of the inputs, which different warps multiply, for more than MOST_FEW rows only
    """

    block_n: int
    block_k: int
    warps: int
    stages: int = 1
    split: int = 1


def bucket(rows: int) -> int:
    """Return `rows` rounded up to a power of two. Kernels are compiled for these numbers of rows."""
    return 1 << (rows - 1).bit_length()


def tiles(rows: int, n: int, k: int, gated: bool) -> Tiles:
    """Return the tiling for x of `rows` rows and a weight of n outputs and k inputs. gated: n each of gate and up.

    The rules give the best of fifteen tilings, measured on an H200 for the products of Qwen3 0.6B and 8B (docs/log.md).
    """
    size = bucket(rows)
    if size <= MOST_FEW:
        if n >= 65536:
            return Tiles(4, 2048 if k > 2048 else 1024, 8 if k > 2048 else 4)
        if gated:
            return Tiles(2, 512, 2) if k <= 2048 else Tiles(2, 2048, 8) if size == 1 else Tiles(4, 512, 2)
        if n <= 2048 < 2 * k:
            return Tiles(2 if k <= 2048 else 1, 2048, 8)
        block_k = min(1024, max(256, bucket(k)))
        return Tiles(8 if k <= 1024 else 4 if n > 4096 else 2, block_k, block_k // 256)
    if size <= 16 and n <= 16384:
        return Tiles(16, 64, 4, 4, 4)
    return Tiles(32 if size <= 16 else 64, 128, 4, 4)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    act: str = "",
    out: Tensor | None = None,
    walk: Tiles | None = None,
) -> Tensor:
    """Multiply x [T, K] of at most MOST_ROWS rows with weight [N, K] -> [T, N] in x's dtype.

    residual   [T, N], added to the product; may be `out`
    norm       [K] weight of an RMS norm with `eps` that is applied to x before the product; None: no norm
    act        activation (`quire.kernels.activation`) of a weight and bias with the rows of gate, then those of up;
               returns it [T, N / 2]. "": no activation
    out        [T, N] of any dtype, which the result is written to; None: a new tensor
    walk       tiling to use; None: `tiles` chooses it
    """
    gated = act != ""
    rows, n, k = x.shape[0], weight.shape[0] >> gated, weight.shape[1]
    if x.stride(1) != 1:
        x = x.contiguous()
    y = x.new_empty(rows, n) if out is None else out
    size = bucket(rows)
    walk = walk or tiles(rows, n, k, gated)
    in_pdl = pdl.in_use()
    shared = (x, weight, bias, residual, norm, y, rows, n, x.stride(0), eps, k, size, walk.block_n, walk.block_k)
    grid = (-(-n // walk.block_n),)
    if size <= MOST_FEW:
        _few_kernel[grid](*shared, act, in_pdl, num_warps=walk.warps, **pdl.options(in_pdl))
    else:
        _some_kernel[grid](
            *shared,
            walk.split,
            walk.stages,
            act,
            in_pdl,
            num_warps=walk.warps,
            num_stages=walk.stages,
            **pdl.options(in_pdl),
        )
    return y


def gather(weight: Tensor, ids: Tensor) -> Tensor:
    """Return the rows `ids` [T] int64 of weight [N, K] as [T, K]; a row is NaN for an id outside [0, N)."""
    width = weight.shape[1]
    y = weight.new_empty(ids.shape[0], width)
    if ids.shape[0]:
        in_pdl = pdl.in_use()
        _gather_kernel[(ids.shape[0],)](
            weight, ids, y, weight.shape[0], width, bucket(width), in_pdl, num_warps=4, **pdl.options(in_pdl)
        )
    return y


@jit
def _fold(x, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """[M, BLOCK_N, BLOCK_K] -> [M, BLOCK_N, BLOCK_K / 8]: add 8 neighbours, which one thread holds."""
    return tl.sum(tl.reshape(x, [M, BLOCK_N, BLOCK_K // 8, 8]), 3)


@jit(do_not_specialize=["rows"])
def _few_kernel(
    x,
    weight,
    bias,
    residual,
    norm,
    y,
    rows,
    n,
    stride,
    eps,
    K: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of up to M <= MOST_FEW rows, without tensor cores. Grid (ceil(n / BLOCK_N),).

    x                   [rows, K];  stride  elements from row to row
    weight              [n, K] contiguous; if GATED [2 n, K], gate first
    bias                [n], if GATED [2 n]; or None
    residual            [rows, n] contiguous, or None;  y  [rows, n] contiguous, output
    norm, eps           [K] weight of an RMS norm of x, or None; added to the mean square
    M                   rows, padded to a power of two
    BLOCK_N, BLOCK_K    outputs of a program; inputs of an iteration
    """
    GATED: tl.constexpr = ACT != ""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)[None, None, :]
    row = tl.arange(0, M)[:, None, None]
    there = (col < n)[None, :, None]
    at = weight + col.to(tl.int64)[None, :, None] * K + lane
    tile = tl.load(at, mask=there & (lane < K), other=0.0, eviction_policy="evict_first")
    if GATED:
        up_at = at + n.to(tl.int64) * K
        up_tile = tl.load(up_at, mask=there & (lane < K), other=0.0, eviction_policy="evict_first")
        up = tl.zeros([M, BLOCK_N, BLOCK_K // 8], tl.float32)
    acc = tl.zeros([M, BLOCK_N, BLOCK_K // 8], tl.float32)
    squares = tl.zeros([M, 1, BLOCK_K // 8], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    to_row, to_col = tl.arange(0, M)[:, None], col[None, :]
    inside = (to_row < rows) & (to_col < n)
    if residual is not None:  # beside the inputs, not behind the sums
        residual = tl.load(residual + to_row * n + to_col, mask=inside, other=0.0)
    for start in range(0, K, BLOCK_K):
        given = tl.load(x + row * stride + start + lane, mask=(row < rows) & (start + lane < K), other=0.0)
        now = tile.to(tl.float32)
        more = there & (start + BLOCK_K + lane < K)
        tile = tl.load(at + start + BLOCK_K, mask=more, other=0.0, eviction_policy="evict_first")
        given = given.to(tl.float32)
        if norm is not None:
            squares += _fold(given * given, M, 1, BLOCK_K)
            given *= tl.load(norm + start + lane, mask=start + lane < K, other=0.0).to(tl.float32)
        acc += _fold(now * given, M, BLOCK_N, BLOCK_K)
        if GATED:
            now = up_tile.to(tl.float32)
            up_tile = tl.load(up_at + start + BLOCK_K, mask=more, other=0.0, eviction_policy="evict_first")
            up += _fold(now * given, M, BLOCK_N, BLOCK_K)
    out = tl.sum(acc, 2)
    other = out
    if GATED:
        other = tl.sum(up, 2)
    if norm is not None:
        inverse = tl.rsqrt(tl.sum(squares, 2) / K + eps)
        out *= inverse
        other *= inverse
    finish(out, other, bias, residual, y, to_row, to_col, n, inside, ACT)


@jit(do_not_specialize=["rows"])
def _some_kernel(
    x,
    weight,
    bias,
    residual,
    norm,
    y,
    rows,
    n,
    stride,
    eps,
    K: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of up to M <= MOST_ROWS rows on tensor cores. Grid (ceil(n / BLOCK_N),).

    x .. BLOCK_K        as in `_few_kernel`
    SPLIT               parts of K that are multiplied side by side: an iteration takes SPLIT * BLOCK_K inputs
    STAGES              iterations in flight; as many are prefetched before `gdc_wait`
    """
    GATED: tl.constexpr = ACT != ""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    STEP: tl.constexpr = SPLIT * BLOCK_K
    EVEN: tl.constexpr = K % STEP == 0
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, M)
    if SPLIT == 1:
        deep, wide = tl.arange(0, BLOCK_K)[:, None], tl.arange(0, BLOCK_K)[None, :]
        tall, row_of = col[:, None], row[None, :]
        acc = tl.zeros([BLOCK_N, M], tl.float32)
        squares = tl.zeros([BLOCK_K, M], tl.float32)
    else:
        part = tl.arange(0, SPLIT)[:, None, None] * BLOCK_K
        deep, wide = part + tl.arange(0, BLOCK_K)[None, :, None], part + tl.arange(0, BLOCK_K)[None, None, :]
        tall, row_of = col[None, :, None], row[None, None, :]
        acc = tl.zeros([SPLIT, BLOCK_N, M], tl.float32)
        squares = tl.zeros([SPLIT, BLOCK_K, M], tl.float32)
    at = weight + tall.to(tl.int64) * K + wide
    up_at = at + n.to(tl.int64) * K
    given_at = x + row_of * stride + deep
    up = acc
    if PDL:
        prefetch(weight, col, n, K, BLOCK_N, STAGES * STEP)
        if GATED:
            prefetch(weight + n.to(tl.int64) * K, col, n, K, BLOCK_N, STAGES * STEP)
        tl.extra.cuda.gdc_wait()
    for start in tl.range(0, K, STEP, num_stages=STAGES):
        there = tall < n
        inside = row_of < rows
        if not EVEN:
            there = there & (start + wide < K)
            inside = inside & (start + deep < K)
        tile = tl.load(at + start, mask=there, other=0.0, eviction_policy="evict_first")
        given = tl.load(given_at + start, mask=inside, other=0.0)
        if norm is not None:
            exact = given.to(tl.float32)
            squares += exact * exact
            scale = tl.load(norm + start + deep, mask=start + deep < K, other=0.0).to(tl.float32)
            given = (exact * scale).to(given.dtype)
        acc = tl.dot(tile, given, acc, input_precision="ieee")
        if GATED:
            tile = tl.load(up_at + start, mask=there, other=0.0, eviction_policy="evict_first")
            up = tl.dot(tile, given, up, input_precision="ieee")
    if SPLIT > 1:
        acc, up, squares = tl.sum(acc, 0), tl.sum(up, 0), tl.sum(squares, 0)
    out, other = acc, up
    if norm is not None:
        inverse = tl.rsqrt(tl.sum(squares, 0) / K + eps)[None, :]
        out *= inverse
        other *= inverse
    row, col = row[None, :], col[:, None]
    finish(out, other, bias, residual, y, row, col, n, (row < rows) & (col < n), ACT)


@jit
def prefetch(weight, col, n, K: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr):
    """Prefetch the first AHEAD inputs of rows `col` of the weight into the L2 cache, in lines of 64 numbers of 2 bytes.

    weight   [n, K] contiguous
    col      [.] numbers of rows (outputs), clamped to n - 1
    """
    LINES: tl.constexpr = AHEAD // 64
    line = tl.arange(0, LINES)[None, :] * 64
    at = weight + tl.minimum(col, n - 1).to(tl.int64)[:, None] * K + tl.minimum(line, K - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def _gather_kernel(weight, ids, y, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy row ids[t] of the weight to row t of y; NaN for ids outside [0, n). Grid (T,).

    weight         [n, WIDTH] contiguous;  ids  [T] int64;  y  [T, WIDTH] contiguous
    WIDTH, BLOCK   elements of a row; padded to a power of two
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    name = tl.load(ids + row)
    found = tl.load(weight + name * WIDTH + col, mask=(col < WIDTH) & (name >= 0) & (name < n), other=float("nan"))
    tl.store(y + row * WIDTH + col, found, mask=col < WIDTH)
