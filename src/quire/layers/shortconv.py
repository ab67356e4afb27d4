"""Recurrent layers with a short convolution."""

from torch import Tensor

from quire.args.layers import NormArgs
from quire.args.shortconv import ShortConvArgs
from quire.kernels.shortconv import ShortConvWeights
from quire.kernels.states import StateView
from quire.layers.branch import Branch
from quire.layers.context import Build, StepContext
from quire.layers.linear import Linear
from quire.layers.recurrence import Recurrence, RecurrentMixer


class ShortConv(RecurrentMixer):
    """The mixer of a recurrent layer with a short convolution, with the channels of this rank.

    Its steps: projection to two gates and the inputs; `kernels.shortconv`, which reads and updates the states of the
    step's requests; output projection.
    """

    def __init__(self, args: ShortConvArgs, at: str, norm: NormArgs, build: Build) -> None:
        super().__init__()
        self.kernels = build.kernels
        self.input, self.taps = Linear(f"{at}.input", build), Recurrence(f"{at}.taps", build.device, ShortConvWeights)
        self.output = Linear(f"{at}.output", build)

    def mixed(self, x: Tensor, branch: Branch, ctx: StepContext, state: StateView) -> Tensor:
        """Return the input of the output projection, [T, channels]."""
        assert ctx.states is not None, "the step has states"
        y: Tensor = self.kernels.shortconv.mix(branch.project(self.input, x, ctx), self.taps.weights, state, ctx.states)
        return y
