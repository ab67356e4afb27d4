"""The gated feed-forward layer."""

from torch import Tensor, nn

from quire.layers.context import Build, StepContext
from quire.layers.linear import GatedLinear, Linear
from quire.layers.norm import RMSNorm


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are a single projection."""

    def __init__(self, at: str, build: Build) -> None:
        super().__init__()
        self.gate_up = GatedLinear(f"{at}.gate_up", build)
        self.down = Linear(f"{at}.down", build)

    def forward(self, hidden: Tensor, norm: RMSNorm, ctx: StepContext) -> Tensor:
        """Return hidden + mlp(norm(hidden)), [T, hidden]; it may reuse the memory of `hidden`."""
        return self.down.add(self.gate_up.normed(hidden, norm, ctx), hidden, ctx)
