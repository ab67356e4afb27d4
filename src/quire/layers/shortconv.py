"""Recurrent layers with a short convolution."""

import torch
from torch import Tensor, nn

from quire.args.layers import NormArgs
from quire.args.shortconv import ShortConvArgs
from quire.kernels.rope.rotary import Turns
from quire.kernels.shortconv import ShortConvWeights
from quire.kernels.states import StateView
from quire.layers.branch import Branch
from quire.layers.context import Build, StepContext
from quire.layers.linear import Linear


class Taps(nn.Module):
    """Weights of a short convolution."""

    weights: ShortConvWeights

    def __init__(self, at: str, device: torch.device) -> None:
        super().__init__()
        self.at, self.device = at, device

    def take(self, tensors: dict[str, Tensor], place: int) -> None:
        """Move the weights to the layer's device, in the form that kernels read. See `Loads`."""
        own = {name: tensor.to(self.device).float() for name, tensor in tensors.items()}
        self.weights = ShortConvWeights(own["conv"].flatten(1).T.contiguous(), own.get("bias"))


class ShortConv(nn.Module):
    """The mixer of a recurrent layer with a short convolution, with the channels of this rank.

    Its steps: projection to two gates and the inputs; `kernels.shortconv`, which reads and updates the states of the
    step's requests; output projection.
    """

    def __init__(self, args: ShortConvArgs, at: str, norm: NormArgs, build: Build) -> None:
        super().__init__()
        self.kernels = build.kernels
        self.input, self.taps = Linear(f"{at}.input", build), Taps(f"{at}.taps", build.device)
        self.output = Linear(f"{at}.output", build)

    def forward(
        self,
        x: Tensor,
        branch: Branch,
        turns: Turns,
        ctx: StepContext,
        state: StateView,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return residual + the mixer of x by way of `branch`, [T, hidden]; it may reuse the memory of the residual.

        residual   None: x
        Updates the states of the step's requests in `state`.
        """
        assert ctx.states is not None, "the step has states"
        rows = branch.project(self.input, x, ctx)
        mixed = self.kernels.shortconv.mix(rows, self.taps.weights, state, ctx.states)
        return branch.add(self.output, mixed, x if residual is None else residual, ctx)
