"""The gated feed-forward layer."""

from torch import Tensor, nn

from quire.layers.context import Build
from quire.layers.linear import GatedLinear, Linear
from quire.layers.norm import RMSNorm


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one projection."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, build: Build) -> None:
        super().__init__()
        self.gate_up = GatedLinear(hidden_size, intermediate_size, bias, build)
        self.down = Linear(intermediate_size, {"": hidden_size}, bias, build)

    def forward(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """hidden [T, hidden] -> hidden + the layer of norm(hidden), perhaps in hidden's memory."""
        return self.down.add(self.gate_up.normed(hidden, norm), hidden)
