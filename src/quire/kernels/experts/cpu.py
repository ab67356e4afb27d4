"""Tokens grouped by expert, each hit expert read once: in bfloat16 by the AMX linears of linear/native.py."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation.cpu import silu_mul
from quire.kernels.experts.ref import placed
from quire.kernels.linear import native
from quire.kernels.native import memory
from quire.kernels.native.library import missing_amx

Packed = list[tuple[Tensor | native.Packed, Tensor | native.Packed]]


def pack(gate_up: Tensor, down: Tensor) -> Packed:
    """The two weights of each expert."""
    if gate_up.dtype == torch.bfloat16 and not missing_amx():
        gated = _together([native.pack_gated(weight) for weight in gate_up])
        return list(zip(gated, _together([native.pack(weight) for weight in down]), strict=True))
    return list(zip(gate_up, down, strict=True))


def _together(weights: list[native.Packed]) -> list[native.Packed]:
    """The same in one piece of memory: huge pages hold more than one expert."""
    data = memory.empty((len(weights), weights[0].data.shape[0]), torch.bfloat16)
    return [replace(weight, data=own.copy_(weight.data)) for weight, own in zip(weights, data, strict=True)]


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
