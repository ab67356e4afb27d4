"""Linear layers with weights of 4 and 8 bits and 16-bit activations on NVIDIA GPUs; Hopper: weight_only_hopper.py.

Up to `weight_only.tiles.MOST_ROWS` rows are multiplied with the packed weight; for more, the weight is unpacked for
the product, which cuBLAS runs. A weight whose groups of inputs are no multiple of 32 runs the reference.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.scheme import Scheme
from quire.kernels.activation import checked
from quire.kernels.activation.triton import gated
from quire.kernels.linear import quantized_ref
from quire.kernels.linear.epilogue import Epilogue
from quire.kernels.pack.matrix import QuantizedMatrix
from quire.kernels.weight_only import tiles as products
from quire.kernels.words import product_words


class WeightOnly(Protocol):
    """A packed weight [N, K] of 4 or 8 bits; activations are not quantized.

    order     [K] int64: the column of x that each column of the weight multiplies; None: columns in their order
    outputs   number of outputs N
    scheme    of the weight
    """

    @property
    def scheme(self) -> Scheme:
        """Scheme of the weight."""

    @property
    def order(self) -> Tensor | None:
        """The column of x that each column of the weight multiplies, [K] int64; None: columns in their order."""

    @property
    def outputs(self) -> int:
        """Number of outputs N."""

    def product(self, x: Tensor, into: Epilogue) -> Tensor:
        """Multiply x, of at most `weight_only.tiles.MOST_ROWS` rows, by the weight; return `into.y`."""

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K] in the floating-point type `dtype`."""


Packed = WeightOnly | QuantizedMatrix


def pack(matrix: QuantizedMatrix) -> Packed:
    """Return the weight packed in the layout that `run` reads. See `quire.kernels.linear`."""
    inputs = matrix.shape[1]
    deep, whole = products.deep_of(matrix.scheme, inputs), inputs % (matrix.scheme.block[1] or inputs) == 0
    return products.tiled(matrix, deep) if deep and whole else matrix


def pack_gated(matrix: QuantizedMatrix) -> Packed:
    """Return the weight (rows of gate, then of up) packed for `run_gated`. See `quire.kernels.linear`."""
    return matrix if matrix.shape[0] % (2 * products.ROWS) else pack(matrix)


def way(x: Tensor, packed: Packed) -> str:
    """Return where `run` dequantizes the weight and quantizes x. See `quire.kernels.linear`."""
    if isinstance(packed, QuantizedMatrix):
        return quantized_ref.way(x, packed)
    few = len(x) <= products.MOST_ROWS
    own = str(x.dtype).removeprefix("torch.")
    return product_words(
        packed.scheme,
        "stays packed, widened in registers"
        if few
        else f"dequantized to {own} by a kernel before; the copy is dropped after the product",
        "",
    )


def run(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias. See `quire.kernels.linear`."""
    return _product(x, packed, bias)


def run_float(x: Tensor, packed: Packed, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias in float32. See `quire.kernels.linear`."""
    if isinstance(packed, QuantizedMatrix):
        y = quantized_ref.run_float(x, packed, bias)
    else:
        y = _product(x, packed, bias, dtype=torch.float32)
    return y if out is None else out.copy_(y)


def run_add(x: Tensor, packed: Packed, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Return residual + x @ weight.T + bias, which overwrites `residual`. See `quire.kernels.linear`."""
    return _product(x, packed, bias, residual=residual)


def run_gated(x: Tensor, packed: Packed, bias: Tensor | None, act: str = "silu") -> Tensor:
    """Return the activation of (gate, up) = x @ weight.T + bias. See `quire.kernels.linear`."""
    return _product(x, packed, bias, act=checked(act))


def _product(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None,
    *,
    residual: Tensor | None = None,
    act: str = "",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Product, activation and residual, as far as given; the arguments are those of `gemv.product`."""
    if isinstance(packed, QuantizedMatrix):
        y = quantized_ref.run(x, packed, bias)
        y = gated(y, act) if act else y
        return y if residual is None else residual + y
    if packed.order is not None:
        x = x[:, packed.order]
    rows = x.shape[0]
    if rows <= products.MOST_ROWS:
        y = x.new_empty(rows, packed.outputs >> (act != ""), dtype=dtype or x.dtype)
        if residual is not None:
            y = residual = residual.contiguous()
        return packed.product(x, Epilogue(y, bias, act, residual)) if rows else y
    weight = packed.unpack(x.dtype)
    if residual is not None:
        residual = residual if bias is None else residual.add_(bias)
        return residual.addmm_(x, weight.t())
    if dtype == torch.float32:
        y = torch.mm(x, weight.t(), out_dtype=dtype)
        return y if bias is None else y.add_(bias)
    y = F.linear(x, weight, bias)
    return gated(y, act) if act else y
