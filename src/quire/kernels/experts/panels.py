"""`cpu` with the linears of linear/panels.py, in their layout: weights stay in their stored type."""

import torch
from torch import Tensor

from quire.kernels.activation.cpu import gated
from quire.kernels.experts.cpu import run_each
from quire.kernels.experts.form import PLAIN, ExpertForm
from quire.kernels.experts.weights import Biases, ExpertWeights, activated, each_expert, empty_biases
from quire.kernels.linear import panels
from quire.kernels.lora.routed import Between, ExpertAdapters, Routed
from quire.kernels.pack.matrix import Weight
from quire.kernels.quantize.ref import quantize_rows as quantize_rows
from quire.kernels.quantize.rows import QuantizedRows

Packed = list[ExpertWeights[panels.Packed]]


def empty(num_experts: int, gate_up: Weight, down: Weight, device: torch.device, form: ExpertForm = PLAIN) -> Packed:
    """Allocate the packed weights of `num_experts` experts, each shaped like `gate_up` and `down`.

    See `quire.kernels.experts`.
    """
    pairs = zip(panels.empty(num_experts, gate_up, True), panels.empty(num_experts, down, False), strict=True)
    return each_expert(list(pairs), empty_biases(num_experts, gate_up, down, device, form), form.act)


def put(packed: Packed, place: int, gate_up: Weight, down: Weight, biases: Biases | None = None) -> None:
    """Pack the weights of an expert into `packed` at the index `place`. See `quire.kernels.experts`."""
    own = packed[place]
    own.put_biases(biases)
    packed[place] = own._replace(gate_up=panels.pack_into(own.gate_up, gate_up), down=panels.pack_into(own.down, down))


def run(
    x: Tensor | QuantizedRows,
    weights: Tensor,
    ids: Tensor,
    packed: Packed,
    expert_map: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return residual + the weighted sum of the outputs of each token's experts. See `quire.kernels.experts`."""
    return run_each(x, (weights, ids, expert_map), packed, residual, expert)


def run_adapted(x: Tensor, routed: Routed, packed: Packed, residual: Tensor | None, adapters: ExpertAdapters) -> Tensor:
    """Compute `run` with adapters. See `quire.kernels.experts`."""
    return run_each(x, routed, packed, residual, _adapted, adapters)


def way(x: Tensor, packed: Packed) -> str:
    """Return where the products dequantize weights and quantize x. See `quire.kernels.experts`."""
    return panels.way(x, packed[0][0]) if packed else ""


def expert(x: Tensor | QuantizedRows, own: ExpertWeights[panels.Packed]) -> Tensor:
    """Return the outputs [n, H] of an expert for rows x, without routing weights."""
    first, second = (None if one is None else one.to(x.dtype) for one in (own.gate_up_bias, own.down_bias))
    return panels.run(panels.run_gated(x, own.gate_up, first, own.act), own.down, second)


def _adapted(x: Tensor, own: ExpertWeights[panels.Packed], between: Between) -> Tensor:
    first, second = (None if one is None else one.to(x.dtype) for one in (own.gate_up_bias, own.down_bias))
    inner = panels.run(x, own.gate_up, first)
    between.add_up(inner, x)
    h = activated(inner, own.act, gated)
    y = panels.run(h, own.down, second)
    between.add_down(y, h)
    return y
