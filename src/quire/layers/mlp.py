"""The gated feed-forward layer."""

from torch import Tensor, nn

from quire.layers.context import Build
from quire.layers.linear import Linear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one projection."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, build: Build) -> None:
        super().__init__()
        self.kernel = build.kernels.activation
        self.gate_up = Linear(hidden_size, {"gate": intermediate_size, "up": intermediate_size}, bias, build)
        self.down = Linear(intermediate_size, {"": hidden_size}, bias, build)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down(self.kernel.silu_mul(self.gate_up(x)))
