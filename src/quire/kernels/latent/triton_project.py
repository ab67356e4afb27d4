"""Products of each head with its own matrix, for up to MOST rows.

For up to FEW rows a program loads its part of a matrix before it waits for the kernel before, and computes in float32
without tensor cores. For more rows it multiplies tiles on tensor cores. More than MOST rows use the vendor's batched
product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.triton_runtime import jit, tl

FEW, MOST = 4, 256  # rows
ROWS, WIDTH, DEEP = 64, 64, 128  # of a tile: most rows, outputs, inputs of an iteration
PART = 8192  # elements of a matrix that a program for few rows holds


def project(x: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """Multiply each head of x by its own matrix of `weights` into `out`; return `out`. See `quire.kernels.latent`."""
    (rows, heads, deep), width = x.shape, weights.shape[2]
    across = weights.stride(2) == 1  # outputs are neighbours in memory, else inputs are
    if not 0 < rows <= MOST or x.stride(2) != 1 or not (across or weights.stride(1) == 1) or not out.is_contiguous():
        torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))
        return out
    in_pdl = pdl.in_use()
    line = weights.stride(1) if across else weights.stride(2)
    shared = (x, weights, out, rows, *x.stride()[:2], weights.stride(0), line, heads, width, deep, _power(deep), across)
    exact = "ieee" if x.dtype == torch.float32 else "tf32"
    if rows <= FEW:
        block = max(4, min(_power(width), PART // _power(deep)))
        _few_kernel[(heads * -(-width // block),)](
            *shared, 1 << (rows - 1).bit_length(), block, in_pdl, num_warps=4, **pdl.options(in_pdl)
        )
    else:
        tile = max(16, min(ROWS, 1 << (rows - 1).bit_length()))
        block = max(16, min(_power(width), WIDTH))
        _some_kernel[(heads * -(-width // block) * -(-rows // tile),)](
            *shared,
            tile,
            block,
            min(DEEP, max(16, _power(deep))),
            exact,
            in_pdl,
            num_warps=4,
            num_stages=3,
            **pdl.options(in_pdl),
        )
    return out


def _power(value: int) -> int:
    return 1 << (value - 1).bit_length()


@jit(do_not_specialize=["rows"])
def _few_kernel(
    x,
    weights,
    out,
    rows,
    stride_x,
    stride_head,
    stride_matrix,
    line,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    ACROSS: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK outputs of a head for up to M <= FEW rows. Grid (HEADS * ceil(N / BLOCK),).

    x                        [rows, HEADS, K]; stride_x, stride_head  elements from row to row, from head to head
    weights                  [HEADS, K, N]; stride_matrix  elements from head to head
    line, ACROSS             stride of inputs, outputs being contiguous, if ACROSS; else stride of outputs
    out                      [rows, HEADS, N] contiguous, output
    K, KP                    inputs; padded to a power of two
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    head = tl.program_id(0).to(tl.int64) // BLOCKS
    col = (tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK))[None, :]
    deep = tl.arange(0, KP)[:, None]
    at = deep * line + col if ACROSS else col * line + deep
    tile = tl.load(weights + head * stride_matrix + at, mask=(deep < K) & (col < N), other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for row in tl.static_range(M):
        if row < rows:
            given = tl.load(x + row * stride_x + head * stride_head + deep, mask=deep < K, other=0.0).to(tl.float32)
            made = tl.sum(tile * given, 0)[None, :]
            tl.store(out + (row * HEADS + head) * N + col, made.to(out.dtype.element_ty), mask=col < N)


@jit(do_not_specialize=["rows"])
def _some_kernel(
    x,
    weights,
    out,
    rows,
    stride_x,
    stride_head,
    stride_matrix,
    line,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    ACROSS: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    DEEP: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK outputs of a head for M rows, on tensor cores. Grid (HEADS * ceil(N / BLOCK) * ceil(rows / M),).

    x .. KP                  as in `_few_kernel`; programs of a matrix are neighbours
    DEEP, EXACT              inputs of an iteration; precision of float32 products
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    tiles = (rows + M - 1) // M
    head = tl.program_id(0).to(tl.int64) // (tiles * BLOCKS)
    place = tl.program_id(0) % (tiles * BLOCKS)
    row = (place % tiles * M + tl.arange(0, M))[:, None]
    col = (place // tiles * BLOCK + tl.arange(0, BLOCK))[None, :]
    across, deep = tl.arange(0, DEEP)[None, :], tl.arange(0, DEEP)[:, None]
    at = deep * line + col if ACROSS else col * line + deep
    step = line if ACROSS else 1
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([M, BLOCK], tl.float32)
    for start in tl.range(0, K, DEEP):
        tile = tl.load(
            weights + head * stride_matrix + at + start * step, mask=(start + deep < K) & (col < N), other=0.0
        )
        given = tl.load(
            x + row.to(tl.int64) * stride_x + head * stride_head + start + across,
            mask=(row < rows) & (start + across < K),
            other=0.0,
        )
        sums = tl.dot(given, tile, sums, input_precision=EXACT)
    to = out + (row.to(tl.int64) * HEADS + head) * N + col
    tl.store(to, sums.to(out.dtype.element_ty), mask=(row < rows) & (col < N))
