"""The gated feed-forward layer."""

from torch import Tensor, nn

from quire.layers.context import Build, StepContext
from quire.layers.linear import GatedLinear, Linear
from quire.layers.norm import RMSNorm


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one projection."""

    def __init__(self, at: str, build: Build) -> None:
        super().__init__()
        self.gate_up = GatedLinear(f"{at}.gate_up", build)
        self.down = Linear(f"{at}.down", build)

    def forward(self, hidden: Tensor, norm: RMSNorm, ctx: StepContext) -> Tensor:
        """hidden [T, hidden] -> hidden + the layer of norm(hidden), perhaps in hidden's memory."""
        return self.down.add(self.gate_up.normed(hidden, norm), hidden)
