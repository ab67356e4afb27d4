"""Gated activations and gates, as their formulas read, in float32."""

import math

import torch
from torch import Tensor

from quire.kernels.activation import POINTWISE, checked


def gated(gate_up: Tensor, act: str = "silu", up: Tensor | None = None) -> Tensor:
    """Return the activation [T, I] of gate and up, the halves of each row. See `quire.kernels.activation`."""
    gate, up = gate_up.float().chunk(2, dim=-1) if up is None else (gate_up.float(), up.float())
    if checked(act) == "silu":
        y = gate * torch.sigmoid(gate) * up
    elif act == "gelu_tanh":
        y = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    elif act == "gelu":
        y = 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))) * up
    else:
        gate = gate.clamp(max=7)
        y = gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)
    return y.to(gate_up.dtype)


def pointwise(x: Tensor, act: str) -> Tensor:
    """Return the activation of each number of x, [T, I]. See `quire.kernels.activation`."""
    if checked(act, POINTWISE) == "relu":
        return x.relu()
    return x.relu().square() if act == "relu2" else gated(x, act, torch.ones_like(x))


def opened(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate), [T, N]. See `quire.kernels.activation`."""
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)
