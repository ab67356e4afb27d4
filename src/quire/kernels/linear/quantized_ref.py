"""Quantized weights of every kind on every device: activations quantized by the scheme's rule, a product in float32.

The truth for other kernels: it never skips the quantization of activations. Weights are dequantized a few rows at a
time.
"""

import torch
from torch import Tensor

from quire.kernels.pack.matrix import QuantizedMatrix, dequantize
from quire.kernels.quantize import ref as quantize
from quire.kernels.quantize.rows import QuantizedRows
from quire.kernels.words import product_words

ROWS = 1024  # of the weight that are dequantized at once; a multiple of 128


def pack(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Return the matrix itself."""
    return matrix


def run(x: Tensor, packed: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias. See `quire.kernels.linear`."""
    return run_float(x, packed, bias).to(x.dtype)


def run_float(x: Tensor | QuantizedRows, packed: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias in float32. See `quire.kernels.linear`; x may be quantized by the scheme's rule."""
    inputs = rounded(x, packed)
    if packed.order is not None:
        inputs = inputs[:, packed.order]
    parts = [inputs @ dequantize(packed, i, i + ROWS).t() for i in range(0, packed.shape[0], ROWS)]
    product = torch.cat(parts, 1) if parts else inputs.new_empty(len(x), 0)
    return product if bias is None else product + bias.float()


def way(x: Tensor, packed: QuantizedMatrix) -> str:
    """Return where `run` dequantizes the weight and quantizes x. See `quire.kernels.linear`."""
    return product_words(packed.scheme, f"dequantized to float32, {ROWS:,} rows at a time", "and dequantized before")


def rounded(x: Tensor | QuantizedRows, matrix: QuantizedMatrix) -> Tensor:
    """Return x in float32; quantized and dequantized first, if the scheme of `matrix` quantizes activations."""
    scheme, given = matrix.scheme, matrix.input_scale
    if isinstance(x, QuantizedRows) or not scheme.inputs:
        return x.float()
    if scheme.inputs == "tensor":
        assert given is not None
        static = quantize.int8_static if scheme.values == "int8" else quantize.fp8_static
        return static(x, given).float() * given
    return quantize.quantize_rows(x, scheme.wire).float()
