"""Linear layers on CUDA whose sums have one order: each output adds all inputs in a single chain, for any rows.

            on Hopper, weights of two-byte types whose rows are aligned to 16 bytes    elsewhere
1 to 64     _few_kernel of linear_hopper.py: 64 outputs, the rows padded to 8            _tile_kernel
65 and up   _many_kernel of linear_hopper.py: 128 outputs, 128 or 256 rows               _tile_kernel

The weights are the tall operand of the tensor cores in all of them, so rows are the columns of a product, which do not
touch each other, and K is never divided among programs. The weight alone decides between the two sides of the table. A
packed weight is the weight itself. A result is rounded before a residual is added, by every kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.activation import checked
from quire.kernels.activation.triton import gated_of
from quire.kernels.invariant import linear_hopper
from quire.kernels.invariant.attention import unfused
from quire.kernels.linear import gemv
from quire.kernels.linear.gemv import bucket
from quire.kernels.triton_runtime import jit, tl

COLS, DEEP = 64, 64  # outputs of a program of _tile_kernel; inputs of an iteration
ROWS = 64  # most rows of a program


def pack(weight: Tensor) -> Tensor:
    """Return the weight itself."""
    return weight.contiguous()


pack_gated = pack


def run(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias. See `quire.kernels.linear`."""
    return _product(x, packed, bias, x.new_empty(x.shape[0], packed.shape[0]))


def run_float(x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias in float32. See `quire.kernels.linear`."""
    if out is None or not out.is_contiguous():
        made = _product(x, packed, bias, x.new_empty(x.shape[0], packed.shape[0], dtype=torch.float32))
        return made if out is None else out.copy_(made)
    return _product(x, packed, bias, out)


def run_add(x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Return residual + x @ weight.T + bias, which overwrites a contiguous `residual`. See `quire.kernels.linear`."""
    residual = residual.contiguous()
    return _product(x, packed, bias, residual, residual=residual)


def run_gated(x: Tensor, packed: Tensor, bias: Tensor | None, act: str = "silu") -> Tensor:
    """Return the activation of (gate, up) = x @ weight.T + bias. See `quire.kernels.linear`."""
    return _product(x, packed, bias, x.new_empty(x.shape[0], packed.shape[0] >> 1), act=checked(act))


def rows(packed: Tensor, ids: Tensor) -> Tensor:
    """Return the rows `ids` of a packed weight (an embedding look-up). See `quire.kernels.linear`."""
    return gemv.gather(packed, ids)


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, *, residual: Tensor | None = None, act: str = ""
) -> Tensor:
    """Multiply x [T, K] with weight [N, K] into y [T, N]; returns y. With `act` the weight is [2 N, K], gate first."""
    if not len(x):
        return y
    if linear_hopper.runs(weight):
        return linear_hopper.product(x, weight, bias, y, residual=residual, act=act)
    x = x if x.stride(1) == 1 else x.contiguous()
    gated, high = act != "", min(ROWS, max(16, bucket(len(x))))
    n, tall = weight.shape[0] >> gated, -(-len(x) // high)
    _tile_kernel[(-(-n // COLS) * tall,)](
        x,
        weight,
        bias,
        residual,
        y,
        len(x),
        n,
        tall,
        x.stride(0),
        K=weight.shape[1],
        M=high,
        BLOCK_N=COLS,
        BLOCK_K=DEEP if x.element_size() == 2 else DEEP // 2,
        ACT=act,
        num_warps=4,
        num_stages=4 if x.element_size() == 2 else 2,
        **unfused(),
    )
    return y


@jit(do_not_specialize=["rows", "tall"])
def _tile_kernel(
    x,
    weight,
    bias,
    residual,
    y,
    rows,
    n,
    tall,
    stride,
    K: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACT: tl.constexpr,
):
    """BLOCK_N outputs of M rows. Grid (ceil(n / BLOCK_N) * tall,); programs of the same outputs follow each other.

    x                  [rows, K];  stride  elements from row to row;  tall  tiles of rows
    weight             [n, K] contiguous; with ACT [2 n, K], gate first
    bias               [n], with ACT [2 n]; or None
    residual           [rows, n] contiguous, is added to the rounded result; or None;  y  [rows, n] contiguous, output
    ACT                see `gated_of`; "": none
    """
    GATED: tl.constexpr = ACT != ""
    row = tl.program_id(0) % tall * M + tl.arange(0, M)
    col = tl.program_id(0) // tall * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    at = weight + tl.minimum(col, n - 1).to(tl.int64)[:, None] * K + lane[None, :]
    source = x + tl.minimum(row, rows - 1).to(tl.int64)[None, :] * stride + lane[:, None]
    acc = tl.zeros([BLOCK_N, M], tl.float32)
    up = acc
    for start in range(0, K, BLOCK_K):
        inside = start + lane < K
        given = tl.load(source + start, mask=inside[:, None], other=0.0)
        acc = tl.dot(tl.load(at + start, mask=inside[None, :], other=0.0), given, acc, input_precision="ieee")
        if GATED:
            tile = tl.load(at + n.to(tl.int64) * K + start, mask=inside[None, :], other=0.0)
            up = tl.dot(tile, given, up, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + col, mask=col < n, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + n + col, mask=col < n, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = gated_of(acc, up, ACT)
    result = acc.to(y.dtype.element_ty)
    to = row.to(tl.int64)[None, :] * n + col[:, None]
    there = (row < rows)[None, :] & (col < n)[:, None]
    if residual is not None:
        added = tl.load(residual + to, mask=there, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + added).to(y.dtype.element_ty)
    tl.store(y + to, result, mask=there)
