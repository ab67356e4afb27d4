"""Beginnings that recurrent mixers share: weights beside their projections, and the way through the layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.rope.rotary import Turns
from quire.kernels.states import StateView
from quire.layers.branch import Branch
from quire.layers.context import StepContext
from quire.layers.linear import Linear


class Recurrence(nn.Module):
    """Weights of a recurrent mixer beside its projections, float32, such as those of its convolution.

    make   returns the weights in the form that kernels read, of tensors by name; `conv` [K, C] is one of them
    """

    weights: Any

    def __init__(self, at: str, device: torch.device, make: Callable[..., Any]) -> None:
        super().__init__()
        self.at, self.device, self._make = at, device, make

    def take(self, tensors: dict[str, Tensor], place: int) -> None:
        """Move the weights to the layer's device, in the form that kernels read. See `Loads`."""
        own = {name: tensor.to(self.device).float().contiguous() for name, tensor in tensors.items()}
        self.weights = self._make(**own | {"conv": own["conv"].flatten(1).T.contiguous()})

    def rows(self, name: str) -> Tensor:
        """Return a parameter as it was stored: the convolution [C, 1, K]."""
        found: Tensor = getattr(self.weights, name)
        return found.T[:, None] if name == "conv" else found


class RecurrentMixer(nn.Module):
    """A mixer of a recurrent layer: `mixed`, which reads and updates states, then the output projection."""

    output: Linear

    def mixed(self, x: Tensor, branch: Branch, ctx: StepContext, state: StateView) -> Tensor:
        """Return the input of the output projection, [T, width], of x by way of `branch`."""
        raise NotImplementedError

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
        mixed = self.mixed(x, branch, ctx, state)
        return branch.add(self.output, mixed, x if residual is None else residual, ctx)
