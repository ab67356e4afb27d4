"""Activations by PyTorch's operators."""

import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation import POINTWISE, checked, ref


def gated(gate_up: Tensor, act: str = "silu", up: Tensor | None = None) -> Tensor:
    """Return the activation [T, I] of gate and up, the halves of each row. See `quire.kernels.activation`."""
    gate, up = gate_up.chunk(2, dim=-1) if up is None else (gate_up, up)
    if checked(act) == "silu":
        return F.silu(gate).mul_(up)
    if act == "gelu_tanh":
        return F.gelu(gate, approximate="tanh").mul_(up)
    return ref.gated(gate, act, up)


def pointwise(x: Tensor, act: str) -> Tensor:
    """Return the activation of each number of x, [T, I]. See `quire.kernels.activation`."""
    if checked(act, POINTWISE) == "silu":
        return F.silu(x)
    if act == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return ref.pointwise(x, act)


def opened(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate), [T, N]. See `quire.kernels.activation`."""
    return gate.sigmoid().mul_(x)
