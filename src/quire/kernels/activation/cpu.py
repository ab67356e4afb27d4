"""silu(gate) * up in two passes, the second in place."""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [T, I]; gate is the first half of each row, up the second."""
    half = gate_up.shape[-1] // 2
    return F.silu(gate_up[:, :half]).mul_(gate_up[:, half:])
