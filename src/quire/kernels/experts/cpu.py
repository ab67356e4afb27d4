"""Experts on a CPU: tokens are grouped by expert, and each hit expert is read once. bfloat16 uses the AMX linears of
linear/native.py."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation.cpu import silu_mul
from quire.kernels.experts.ref import placed
from quire.kernels.linear import native
from quire.kernels.native import memory
from quire.kernels.native.library import missing_amx

Packed = list[tuple[Tensor | native.Packed, Tensor | native.Packed]]


def empty(num_experts: int, gate_up: Tensor, down: Tensor, device: torch.device) -> Packed:
    """See `quire.kernels.experts`. bfloat16 on AMX gets the layout of linear/native.py, other weights stay unchanged.

    All gate_up weights share one piece of memory, all down weights another: a huge page can hold several experts.
    """
    if gate_up.dtype == torch.bfloat16 and not missing_amx():
        return list(zip(native.empty(num_experts, gate_up, True), native.empty(num_experts, down, False), strict=True))
    first, second = (memory.empty((num_experts, *one.shape), one.dtype) for one in (gate_up, down))
    return list(zip(first, second, strict=True))


def put(packed: Packed, place: int, gate_up: Tensor, down: Tensor) -> None:
    """See `quire.kernels.experts`."""
    for room, weight in zip(packed[place], (gate_up, down), strict=True):
        if isinstance(room, native.Packed):
            native.pack_into(room, weight)
        else:
            room.copy_(weight)


def run(x: Tensor, weights: Tensor, ids: Tensor, packed: Packed, expert_map: Tensor | None = None,
        residual: Tensor | None = None) -> Tensor:
    """See `quire.kernels.experts`."""
    places, order = placed(ids, expert_map).flatten().sort(stable=True)
    counts = torch.bincount(places + 1, minlength=len(packed) + 1).tolist()
    end = counts[0]
    rows, parts = x[order // ids.shape[1]], x.new_empty(ids.numel(), x.shape[1])
    parts[order[:end]] = 0
    for (gate_up, down), count in zip(packed, counts[1:], strict=True):
        if count:
            start, end = end, end + count
            parts[order[start:end]] = _expert(rows[start:end], gate_up, down)
    y = (weights[:, None] @ parts.view(*ids.shape, x.shape[1]).float()).squeeze(1)
    return (y if residual is None else y.add_(residual)).to(x.dtype)


def _expert(x: Tensor, gate_up: Tensor | native.Packed, down: Tensor | native.Packed) -> Tensor:
    if isinstance(gate_up, native.Packed) and isinstance(down, native.Packed):
        return native.run(native.run_gated(x, gate_up, None), down, None)
    return F.linear(silu_mul(F.linear(x, gate_up)), down)
