"""The layout of most kernels: unchanged weights of all experts, stacked: [experts, 2I, H] and [experts, H, I]."""

import torch
from torch import Tensor

from quire.kernels.experts.form import PLAIN, ExpertForm
from quire.kernels.experts.weights import Biases, ExpertWeights, empty_biases

Packed = ExpertWeights[Tensor]


def empty(num_experts: int, gate_up: Tensor, down: Tensor, device: torch.device, form: ExpertForm = PLAIN) -> Packed:
    """Allocate the packed weights of `num_experts` experts, each shaped like `gate_up` and `down`.

    See `quire.kernels.experts`.
    """
    first, second = (torch.empty((num_experts, *one.shape), dtype=one.dtype, device=device) for one in (gate_up, down))
    return ExpertWeights(first, second, form.act, *empty_biases(num_experts, gate_up, down, device, form))


def put(packed: Packed, place: int, gate_up: Tensor, down: Tensor, biases: Biases | None = None) -> None:
    """Pack the weights of an expert into `packed` at the index `place`. See `quire.kernels.experts`."""
    packed.gate_up[place].copy_(gate_up, non_blocking=True)
    packed.down[place].copy_(down, non_blocking=True)
    packed.put_biases(biases, place)


def destination(packed: Packed) -> tuple[Tensor, Tensor]:
    """Return the memory of all experts' weights (gate_up, down) for a loader to fill. See `quire.kernels.experts`."""
    return packed.gate_up, packed.down
