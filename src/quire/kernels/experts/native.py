"""`cpu` with the AMX linears of linear/native.py, in their layout."""

import torch
from torch import Tensor

from quire.kernels.experts.cpu import run_each
from quire.kernels.linear import native

Packed = list[tuple[native.Packed, native.Packed]]


def empty(num_experts: int, gate_up: Tensor, down: Tensor, device: torch.device) -> Packed:
    """Allocate the packed weights of `num_experts` experts, each shaped like `gate_up` and `down`.

    See `quire.kernels.experts`.
    """
    return list(zip(native.empty(num_experts, gate_up, True), native.empty(num_experts, down, False), strict=True))


def put(packed: Packed, place: int, gate_up: Tensor, down: Tensor) -> None:
    """Pack the weights of an expert into `packed` at the index `place`. See `quire.kernels.experts`."""
    for room, weight in zip(packed[place], (gate_up, down), strict=True):
        native.pack_into(room, weight)


def run(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    packed: Packed,
    expert_map: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return residual + the weighted sum of the outputs of each token's experts. See `quire.kernels.experts`."""
    return run_each(x, weights, ids, packed, expert_map, residual, _expert)


def _expert(x: Tensor, gate_up: native.Packed, down: native.Packed) -> Tensor:
    return native.run(native.run_gated(x, gate_up, None), down, None)
