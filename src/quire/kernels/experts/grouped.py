"""Experts as two grouped products of PyTorch, on tokens sorted by expert. Does not wait for the device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation.ref import gated
from quire.kernels.experts import stacked
from quire.kernels.experts.form import PLAIN, ExpertForm
from quire.kernels.experts.ref import placed
from quire.kernels.experts.weights import Biases


def empty(
    num_experts: int, gate_up: Tensor, down: Tensor, device: torch.device, form: ExpertForm = PLAIN
) -> stacked.Packed:
    """Allocate the packed weights of `num_experts` experts, each shaped like `gate_up` and `down`.

    See `quire.kernels.experts`. The packed weights are transposed views of the stacked weights.
    """
    made = stacked.empty(num_experts, gate_up, down, device, form)
    return made._replace(gate_up=made.gate_up.mT, down=made.down.mT)


def put(packed: stacked.Packed, place: int, gate_up: Tensor, down: Tensor, biases: Biases | None = None) -> None:
    """Pack the weights of an expert into `packed` at the index `place`. See `quire.kernels.experts`."""
    stacked.put(packed, place, gate_up.mT, down.mT, biases)


def destination(packed: stacked.Packed) -> tuple[Tensor, Tensor]:
    """Return the memory of all experts' weights (gate_up, down) for a loader to fill. See `quire.kernels.experts`."""
    return packed.gate_up.mT, packed.down.mT


def run(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    packed: stacked.Packed,
    expert_map: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return residual + the weighted sum of the outputs of each token's experts. See `quire.kernels.experts`."""
    gate_up, down, act, first, second = packed
    num_experts = len(gate_up)
    places = placed(ids, expert_map).flatten()
    places, order = torch.where(places < 0, num_experts, places).sort(stable=True)
    ends = torch.searchsorted(places, torch.arange(num_experts, device=x.device), right=True, out_int32=True)
    own = places.clamp(max=num_experts - 1)
    inner = F.grouped_mm(x[order // ids.shape[1]], gate_up, offs=ends)
    found = F.grouped_mm(gated(inner if first is None else inner + first[own], act), down, offs=ends)
    found = found if second is None else found + second[own]
    parts = torch.empty_like(found)
    parts[order] = torch.where((places < num_experts)[:, None], found, 0)  # rows of no expert were not written
    y = (weights[:, None] @ parts.view(*ids.shape, x.shape[1]).float()).squeeze(1)
    return (y if residual is None else y + residual).to(x.dtype)
