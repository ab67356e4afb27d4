"""A tap: a step feature that shows hidden states to a caller, for traces, comparisons and tests."""

from dataclasses import replace

from torch import Tensor

from quire.contracts.step import StepPlan
from quire.layers.context import StepContext
from quire.layers.stack import Model, Tap, run_layers
from quire.worker.features import Layers, StepFeature
from quire.worker.recorder import StepShape


class HiddenTap(StepFeature):
    """Shows the hidden states of each layer.

    While a runner has this feature, steps run eagerly, layer by layer, and each operation by itself.
    """

    def __init__(self, model: Model, tap: Tap) -> None:
        self._model, self._tap = model, tap

    def fit(self, plan: StepPlan, shape: StepShape) -> StepShape:
        return replace(shape, eager=True)

    def run_layers(self, plan: StepPlan, hidden: Tensor, ctx: StepContext, layers: Layers) -> Tensor:
        ctx.apart = True
        return run_layers(self._model, hidden, ctx, layers, self._tap)
