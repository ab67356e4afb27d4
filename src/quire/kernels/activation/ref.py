"""silu(gate) * up, as the formula reads, in float32."""

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [T, I]; gate is the first half of each row, up the second."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
