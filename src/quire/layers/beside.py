"""The feed-forward layer of a gated MLP and experts beside each other."""

import torch
from torch import Tensor, nn

from quire.args.layers import BesideArgs, NormArgs
from quire.layers.branch import Branch
from quire.layers.context import Build, StepContext
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MoE
from quire.layers.norm import Norm


class MLPBesideExperts(nn.Module):
    """Norms of a gated MLP and of experts, added. Both read the residual stream, each after a norm of its own.

    The router reads the stream itself. The norm before the MLP and the one of the sum are the branch's.
    """

    def __init__(self, args: BesideArgs, at: str, hidden_size: int, build: Build, norm: NormArgs) -> None:
        super().__init__()
        self.mlp = GatedMLP(at, build, args.dense.act)
        self.moe = MoE(args.experts, at, hidden_size, build)
        self.dense_after = Norm(f"{at}.dense_after", norm, build)
        self.experts_norm = Norm(f"{at}.experts_norm", norm, build)
        self.experts_after = Norm(f"{at}.experts_after", norm, build)

    def forward(self, x: Tensor, branch: Branch, ctx: StepContext, residual: Tensor | None = None) -> Tensor:
        """Return residual + the two parts of x by way of `branch`, [T, hidden]; it may reuse the residual's memory.

        residual   None: x
        """
        inner = branch.project(self.mlp.gate_up, x, ctx)
        dense = self.dense_after(self.mlp.down.summed(inner, ctx))
        experts = self.moe.added(self.experts_norm(x), x, torch.zeros_like(x), ctx)
        return branch.join(self.experts_after.added(experts, dense), x if residual is None else residual)
