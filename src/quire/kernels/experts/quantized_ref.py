"""Experts with quantized weights: each is a pair of matrices that `quire.kernels.linear.quantized_ref` multiplies."""

import torch
from torch import Tensor

from quire.kernels.activation.ref import silu_mul
from quire.kernels.linear import quantized_ref
from quire.kernels.pack.matrix import QuantizedMatrix, empty
from quire.kernels.quantize.rows import QuantizedRows

Pair = tuple[QuantizedMatrix, QuantizedMatrix]


def empty_pairs(num_experts: int, gate_up: QuantizedMatrix, down: QuantizedMatrix, device: torch.device) -> list[Pair]:
    """Return uninitialized matrices (gate_up, down) of each expert, shaped and quantized like `gate_up` and `down`."""
    return [
        (empty(gate_up.scheme, gate_up.shape, device), empty(down.scheme, down.shape, device))
        for _ in range(num_experts)
    ]


def put_pair(room: Pair, gate_up: QuantizedMatrix, down: QuantizedMatrix) -> None:
    """Copy the matrices of an expert into `room`, an element of the list that `empty_pairs` returned."""
    for target, source in zip(room, (gate_up, down), strict=True):
        for name, tensor in target.tensors.items():
            tensor.copy_(source.tensors[name], non_blocking=True)


def way(x: Tensor, pairs: object) -> str:
    """Return where the products dequantize weights and quantize x; "" for experts that are no `Pair`."""
    return quantized_ref.way(x, pairs[0][0]) if isinstance(pairs, list) and pairs else ""


def run_pair(x: Tensor | QuantizedRows, gate_up: QuantizedMatrix, down: QuantizedMatrix) -> Tensor:
    """Run rows x [n, H] through an expert; return [n, H] float32. Activations are quantized by the scheme."""
    inner = silu_mul(quantized_ref.run_float(x, gate_up, None))
    return quantized_ref.run_float(inner, down, None)
