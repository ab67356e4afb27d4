"""Experts one after the other, in float32."""

import torch
from torch import Tensor

from quire.kernels.activation.ref import silu_mul
from quire.kernels.experts.stacked import destination as destination
from quire.kernels.experts.stacked import empty as empty
from quire.kernels.experts.stacked import put as put


def run(x: Tensor, weights: Tensor, ids: Tensor, packed: tuple[Tensor, Tensor], expert_map: Tensor | None = None,
        residual: Tensor | None = None) -> Tensor:
    """See `quire.kernels.experts`."""
    places = placed(ids, expert_map)
    y = torch.zeros_like(x, dtype=torch.float32) if residual is None else residual.float()
    for place, (gate_up, down) in enumerate(zip(*packed, strict=True)):
        scale = (weights * (places == place)).sum(1, keepdim=True)
        y = y + scale * (silu_mul(x.float() @ gate_up.float().t()) @ down.float().t())
    return y.to(x.dtype)


def placed(ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """Return the places of the experts `ids` on this rank; -1 for an expert of another rank."""
    if expert_map is None:
        return ids
    return torch.where(ids < 0, -1, expert_map[ids.clamp(min=0)])
