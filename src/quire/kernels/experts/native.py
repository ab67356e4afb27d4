"""`cpu` with the AMX linears of linear/native.py, in their layout."""

import torch
from torch import Tensor

from quire.kernels.experts.cpu import run_each
from quire.kernels.experts.form import PLAIN, ExpertForm
from quire.kernels.experts.weights import Biases, ExpertWeights, each_expert, empty_biases
from quire.kernels.linear import native

Packed = list[ExpertWeights[native.Packed]]


def empty(num_experts: int, gate_up: Tensor, down: Tensor, device: torch.device, form: ExpertForm = PLAIN) -> Packed:
    """Allocate the packed weights of `num_experts` experts, each shaped like `gate_up` and `down`.

    See `quire.kernels.experts`.
    """
    pairs = zip(native.empty(num_experts, gate_up, True), native.empty(num_experts, down, False), strict=True)
    return each_expert(list(pairs), empty_biases(num_experts, gate_up, down, device, form), form.act)


def put(packed: Packed, place: int, gate_up: Tensor, down: Tensor, biases: Biases | None = None) -> None:
    """Pack the weights of an expert into `packed` at the index `place`. See `quire.kernels.experts`."""
    own = packed[place]
    native.pack_into(own.gate_up, gate_up)
    native.pack_into(own.down, down)
    own.put_biases(biases)


def run(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    packed: Packed,
    expert_map: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return residual + the weighted sum of the outputs of each token's experts. See `quire.kernels.experts`."""
    return run_each(x, (weights, ids, expert_map), packed, residual, _expert)


def _expert(x: Tensor, own: ExpertWeights[native.Packed]) -> Tensor:
    return native.run(native.run_gated(x, own.gate_up, own.gate_up_bias, own.act), own.down, own.down_bias)
