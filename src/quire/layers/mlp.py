"""The gated feed-forward layer."""

from torch import Tensor, nn

from quire.kernels.activation import UNGATED
from quire.layers.branch import Branch
from quire.layers.context import Build, StepContext
from quire.layers.linear import ActivatedLinear, GatedLinear, Linear


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); gate and up are a single projection. act: see `quire.kernels.activation`.

    Without a gate, by an activation of `UNGATED`: down(act(up(x))).
    """

    def __init__(self, at: str, build: Build, act: str = "silu", gate_scale: float = 1.0) -> None:
        super().__init__()
        name = f"{at}.gate_up"
        self.gate_up = (
            ActivatedLinear(name, build, act) if act in UNGATED else GatedLinear(name, build, act, gate_scale)
        )
        self.down = Linear(f"{at}.down", build)

    def forward(self, x: Tensor, branch: Branch, ctx: StepContext, residual: Tensor | None = None) -> Tensor:
        """Return residual + mlp(x) by way of `branch`, [T, hidden]; it may reuse the memory of the residual.

        residual   None: x
        """
        return branch.add(self.down, branch.project(self.gate_up, x, ctx), x if residual is None else residual, ctx)
