"""Linear layers with weights of 4 and 8 bits and bfloat16 activations on Hopper (compute capability 9.0).

Up to `weight_only.words.MOST_ROWS` rows are multiplied with the packed weight; for more, the weight is unpacked for the
product, which cuBLAS runs. A weight whose groups of inputs are no multiple of 32 runs the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.linear.epilogue import Epilogue
from quire.kernels.linear.weight_only import Packed, run, run_add, run_float, run_gated, way
from quire.kernels.norm.triton import rms_norm
from quire.kernels.pack.matrix import QuantizedMatrix
from quire.kernels.weight_only import words
from quire.kernels.weight_only.weight_words import WeightWords

__all__ = ["pack", "pack_gated", "run", "run_add", "run_float", "run_gated", "run_norm", "run_norm_gated", "way"]


def pack(matrix: QuantizedMatrix) -> Packed:
    """Return the weight packed in the layout that `run` reads. See `quire.kernels.linear`."""
    return _pack(matrix, False)


def pack_gated(matrix: QuantizedMatrix) -> Packed:
    """Return the weight (rows of gate, then of up) packed for `run_gated`. See `quire.kernels.linear`."""
    return _pack(matrix, True)


def _pack(matrix: QuantizedMatrix, gated: bool) -> Packed:
    (n, k), group = matrix.shape, matrix.scheme.block[1] or matrix.shape[1]
    if group % 32 or k % group:
        return matrix
    zeros = None if matrix.zero is None else words.repack_scales(matrix.zero, gated)
    powers = matrix.scheme.kind == "mxfp4"
    counters = torch.zeros((n // 64 + 2) * words.MOST_ROWS // 128, dtype=torch.int32, device=matrix.values.device)
    return WeightWords(
        words.repack(matrix.values, matrix.scheme.bits, gated, powers),
        (words.repack_powers if powers else words.repack_scales)(matrix.scale, gated),
        zeros,
        None if matrix.order is None else matrix.order.long(),
        counters,
        (n, k),
        matrix.scheme.bits,
        group,
        gated,
        matrix.scheme,
    )


def run_norm(x: Tensor, weight: Tensor, eps: float, packed: Packed, bias: Tensor | None, act: str = "") -> Tensor:
    """Apply an RMS norm with `weight` and `eps` to x; return `run` of the result. See `quire.kernels.linear`.

    act   of `run_norm_gated`; "": none
    """
    if len(x) == 1 and isinstance(packed, WeightWords) and packed.order is None:
        into = Epilogue(x.new_empty(1, packed.outputs >> (act != "")), bias, act)
        if (done := packed.one_row(x, into, (weight, eps))) is not None:
            return done
    x = rms_norm(x, weight, eps)
    return run_gated(x, packed, bias, act) if act else run(x, packed, bias)


def run_norm_gated(
    x: Tensor, weight: Tensor, eps: float, packed: Packed, bias: Tensor | None, act: str = "silu"
) -> Tensor:
    """Apply an RMS norm with `weight` and `eps` to x; return `run_gated` of the result. See `quire.kernels.linear`."""
    return run_norm(x, weight, eps, packed, bias, act)
