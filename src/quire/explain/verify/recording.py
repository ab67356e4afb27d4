"""Results of the steps of a model, and the wrappers that record them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.layers.context import StepContext
from quire.layers.norm import Norm

ATTENTION, FEED_FORWARD = "attention", "feed-forward"  # the two halves of a layer
# The use of a layer's embedding of each token: modules of the reference's layer, and inputs of the first two of them.
INPUT_STEPS = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
INPUT_SUM, INPUT_PRODUCT = "sum before its embedding", "product with its embedding"


class Recording:
    """Results of the operations of a model, `pieces[stage][step]`, in the order in which they are computed.

    stage    "embed", a half of a layer ("layer 3 attention"), "norm" or "logits"
    step     an operation of the stage, such as "q_proj"
    A piece is the result [T, ...] in a single engine step; `result` joins the pieces.

    kinds   of each half of a layer
    after   of each layer the path of the reference's module that reads the sum after attention; "": none does
    ends    of each layer its last half
    """

    def __init__(self) -> None:
        self.pieces: dict[str, dict[str, list[Tensor]]] = {}
        self.kinds: dict[str, Any] = {}
        self.after: dict[int, str] = {}
        self.ends: dict[int, str] = {}

    def keep(self, stage: str, step: str, result: Tensor) -> None:
        """Add a copy of the result of `step` in the next engine step. It is a copy, because kernels reuse memory."""
        self.pieces.setdefault(stage, {}).setdefault(step, []).append(result.detach().clone())

    def result(self, stage: str, step: str) -> Tensor:
        """Return the result [T, ...] for all tokens, in their order."""
        return torch.cat(self.pieces[stage][step])


def stage_name(layer: int, half: str) -> str:
    """Return the name of a half of a layer, such as "layer 3 attention"."""
    return f"layer {layer} {half}"


def on_result(module: Any, keep: Any, step: str) -> None:
    """Record the result of a module."""
    module.register_forward_hook(lambda module, given, result: keep(step, result))


def on_added(norm: Norm, keep: Callable[[str, Tensor], None], step: str) -> None:
    """Record the result of a norm that also adds the residual, without the residual."""
    added = norm.added

    def tapped(x: Tensor, residual: Tensor, factor: Tensor | None = None) -> Tensor:
        keep(step, added(x, torch.zeros_like(residual)))
        return added(x, residual, factor)

    norm.added = tapped  # type: ignore[method-assign]


def on_sum(linear: Any, keep: Any, given: str, step: str) -> None:
    """Record the input of a projection, and its product without the residual."""
    add, summed = linear.add, linear.summed

    def tapped(x: Tensor, residual: Tensor, ctx: StepContext) -> Tensor:
        keep(given, x)
        keep(step, add(x.clone(), torch.zeros_like(residual), ctx))
        result: Tensor = add(x, residual, ctx)
        return result

    def tapped_alone(x: Tensor, ctx: StepContext) -> Tensor:
        keep(given, x)
        result: Tensor = summed(x, ctx)
        keep(step, result)
        return result

    linear.add, linear.summed = tapped, tapped_alone
