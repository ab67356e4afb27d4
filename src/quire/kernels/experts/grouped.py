"""Experts as two grouped products of PyTorch, on tokens sorted by expert. Does not wait for the device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation.ref import silu_mul
from quire.kernels.experts import stacked
from quire.kernels.experts.ref import placed


def empty(num_experts: int, gate_up: Tensor, down: Tensor, device: torch.device) -> stacked.Packed:
    """Allocate the packed weights of `num_experts` experts, each shaped like `gate_up` and `down`.

    See `quire.kernels.experts`. The packed weights are transposed views of the stacked weights.
    """
    first, second = stacked.empty(num_experts, gate_up, down, device)
    return first.mT, second.mT


def put(packed: stacked.Packed, place: int, gate_up: Tensor, down: Tensor) -> None:
    """Pack the weights of an expert into `packed` at the index `place`. See `quire.kernels.experts`."""
    stacked.put(packed, place, gate_up.mT, down.mT)


def destination(packed: stacked.Packed) -> stacked.Packed:
    """Return the memory of all experts' weights (gate_up, down) for a loader to fill. See `quire.kernels.experts`."""
    return packed[0].mT, packed[1].mT


def run(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    packed: tuple[Tensor, Tensor],
    expert_map: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return residual + the weighted sum of the outputs of each token's experts. See `quire.kernels.experts`."""
    num_experts = packed[0].shape[0]
    places = placed(ids, expert_map).flatten()
    places, order = torch.where(places < 0, num_experts, places).sort(stable=True)
    ends = torch.searchsorted(places, torch.arange(num_experts, device=x.device), right=True, out_int32=True)
    gate_up, down = packed
    inner = silu_mul(F.grouped_mm(x[order // ids.shape[1]], gate_up, offs=ends))
    found = F.grouped_mm(inner, down, offs=ends)
    parts = torch.empty_like(found)
    parts[order] = torch.where((places < num_experts)[:, None], found, 0)  # rows of no expert were not written
    y = (weights[:, None] @ parts.view(*ids.shape, x.shape[1]).float()).squeeze(1)
    return (y if residual is None else y + residual).to(x.dtype)
