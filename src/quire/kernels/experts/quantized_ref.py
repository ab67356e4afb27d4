"""Experts with quantized weights: each is a pair of matrices that `quire.kernels.linear.quantized_ref` multiplies."""

import torch
from torch import Tensor

from quire.kernels.activation.ref import gated
from quire.kernels.experts.form import PLAIN, ExpertForm
from quire.kernels.experts.weights import Biases, ExpertWeights, activated, each_expert, empty_biases
from quire.kernels.linear import quantized_ref
from quire.kernels.lora.routed import Between
from quire.kernels.pack.matrix import QuantizedMatrix, empty
from quire.kernels.quantize.rows import QuantizedRows

Pair = tuple[QuantizedMatrix, QuantizedMatrix]
Pairs = list[ExpertWeights[QuantizedMatrix]]


def empty_pairs(
    num_experts: int,
    gate_up: QuantizedMatrix,
    down: QuantizedMatrix,
    device: torch.device,
    form: ExpertForm = PLAIN,
) -> Pairs:
    """Return uninitialized weights of each expert, with matrices shaped and quantized like `gate_up` and `down`."""
    matrices = [
        (empty(gate_up.scheme, gate_up.shape, device), empty(down.scheme, down.shape, device))
        for _ in range(num_experts)
    ]
    return each_expert(matrices, empty_biases(num_experts, gate_up, down, device, form), form.act)


def put_pair(
    room: ExpertWeights[QuantizedMatrix],
    gate_up: QuantizedMatrix,
    down: QuantizedMatrix,
    biases: Biases | None = None,
) -> None:
    """Copy the weights of an expert into `room`, an element of the list that `empty_pairs` returned."""
    for target, source in ((room.gate_up, gate_up), (room.down, down)):
        for name, tensor in target.tensors.items():
            tensor.copy_(source.tensors[name], non_blocking=True)
    room.put_biases(biases)


def way(x: Tensor, pairs: object) -> str:
    """Return where the products dequantize weights and quantize x; "" for experts that are not quantized."""
    return quantized_ref.way(x, pairs[0][0]) if isinstance(pairs, list) and pairs else ""


def run_pair(x: Tensor | QuantizedRows, own: ExpertWeights[QuantizedMatrix], between: Between | None = None) -> Tensor:
    """Run rows x [n, H] through an expert; return [n, H] float32. Activations are quantized by the scheme.

    between   adds the products of adapters; None: there are none
    """
    inner = quantized_ref.run_float(x, own.gate_up, own.gate_up_bias)
    if between is not None:
        assert isinstance(x, Tensor), "rows of other replicas have no adapters"
        between.add_up(inner, x)
    h = activated(inner, own.act, gated)
    y = quantized_ref.run_float(h, own.down, own.down_bias)
    if between is not None:
        between.add_down(y, h)
    return y
