"""The end of a product: operations on the sums, and sums of parts of K, which the program that ends last adds up."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from quire.kernels.activation.triton import gated_in_gluon, gated_of
from quire.kernels.triton_runtime import gl, gluon_jit, jit, tl


class Epilogue(NamedTuple):
    """Operations on the sums of a product, in the order of the fields, and the tensor for the result.

    y          [T, N] contiguous, of any dtype: the result is written to it
    bias       [N], or [2 N] with an activation; None: no bias
    act        activation (`quire.kernels.activation`) of a weight with 2 N rows, those of gate, then those of up, which
               the sums become; "": the weight has no gate
    residual   [T, N], is added; may be `y`; None: nothing is added
    """

    y: Tensor
    bias: Tensor | None = None
    act: str = ""
    residual: Tensor | None = None

    @property
    def gated(self) -> bool:
        """True for a weight with gate and up."""
        return self.act != ""


@jit
def give_part(acc, up, first, counters, tile, GATED: tl.constexpr):
    """Store the sums of this program's part of K. Return the number of programs of the tile that had ended before.

    acc, up    [HIGH, M] float32: of gate and up if GATED, else `up` is not used
    first      pointers [HIGH, M] to the sums of the first part, in memory [split, 1 or 2, HIGH, M] float32
    counters   [tiles] int32: programs of a tile that have ended. The last program sets the counter to zero again
    tile       number of the program's tile of outputs and rows
    """
    SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
    EACH: tl.constexpr = 2 * SIZE if GATED else SIZE
    tl.store(first + tl.program_id(1) * EACH, acc)
    if GATED:
        tl.store(first + tl.program_id(1) * EACH + SIZE, up)
    tl.debug_barrier()  # all stores of the program come before its tick
    return tl.atomic_add(counters + tile, 1, sem="acq_rel")


@jit
def sum_parts(first, SPLIT: tl.constexpr, GATED: tl.constexpr):
    """Return the sums of all parts of K, [HIGH, M] float32 of gate and of up. first: see `give_part`."""
    SIZE: tl.constexpr = first.shape[0] * first.shape[1]
    EACH: tl.constexpr = 2 * SIZE if GATED else SIZE
    acc = tl.zeros(first.shape, tl.float32)
    up = acc
    for part in tl.static_range(SPLIT):
        acc += tl.load(first + part * EACH, cache_modifier=".cg")
        if GATED:
            up += tl.load(first + part * EACH + SIZE, cache_modifier=".cg")
    return acc, up


@jit
def finish(out, other, bias, residual, y, row, col, n, inside, ACT: tl.constexpr):
    """Apply bias, activation and residual, and store the result.

    out, other            products, float32: of gate and up with ACT, else `other` is not used
    bias, residual, y     as in `gemv._few_kernel`; or `residual` is the numbers, loaded before
    row, col, inside      indices of the results, and a mask; they broadcast to the shape of `out`
    ACT                   see `Epilogue`
    """
    at = row * n + col
    if bias is not None:
        out += tl.load(bias + col, mask=col < n, other=0.0).to(tl.float32)
    if ACT != "":
        if bias is not None:
            other += tl.load(bias + n + col, mask=col < n, other=0.0).to(tl.float32)
        out = gated_of(out, other, ACT)
    if residual is not None:
        if residual.dtype.is_ptr():
            residual = tl.load(residual + at, mask=inside, other=0.0)
        out += residual.to(tl.float32)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@gluon_jit
def finish_in_gluon(out, other, bias, residual, y, row, col, rows, n, ACT: gl.constexpr):
    """`finish` of a Gluon kernel: out, other [outputs, rows], with the indices `col` and `row` of these."""
    inside = (col < n)[:, None] & (row < rows)[None, :]
    if bias is not None:
        out += gl.load(bias + col, mask=col < n, other=0.0).to(gl.float32)[:, None]
    if ACT != "":
        if bias is not None:
            other += gl.load(bias + n + col, mask=col < n, other=0.0).to(gl.float32)[:, None]
        out = gated_in_gluon(out, other, ACT)
    at = row[None, :] * n + col[:, None]
    if residual is not None:
        if residual.dtype.is_ptr():
            residual = gl.load(residual + at, mask=inside, other=0.0)
        out += residual.to(gl.float32)
    gl.store(y + at, out.to(y.dtype.element_ty), mask=inside)
