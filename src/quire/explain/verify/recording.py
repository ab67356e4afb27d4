"""Results of the steps of a model, and the wrappers that record them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.contracts.params import Part
from quire.distributed import Group
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

    kinds       of each half of a layer
    after       of each layer the path of the reference's module that reads the sum after attention; "": none does
    ends        of each layer its last half
    positions   of the rows of each engine step. A step that follows refused drafts computes their positions again
    """

    def __init__(self) -> None:
        self.pieces: dict[str, dict[str, list[Tensor]]] = {}
        self.kinds: dict[str, Any] = {}
        self.after: dict[int, str] = {}
        self.ends: dict[int, str] = {}
        self.positions: list[Tensor] = []

    def keep(self, stage: str, step: str, result: Tensor) -> None:
        """Add a copy of the result of `step` in the next engine step. It is a copy, because kernels reuse memory."""
        self.pieces.setdefault(stage, {}).setdefault(step, []).append(result.detach().to("cpu", copy=True))

    def result(self, stage: str, step: str) -> Tensor:
        """Return the result [T, ...] for all tokens, in their order, of each token the one computed last."""
        last = {place: row for row, place in enumerate(torch.cat(self.positions).tolist())}
        return torch.cat(self.pieces[stage][step])[[last[place] for place in range(len(last))]]

    def settle(self, length: int) -> None:
        """Join the pieces, and leave out what was computed behind the first `length` tokens."""
        for stage, steps in self.pieces.items():
            self.pieces[stage] = {step: [self.result(stage, step)[:length].contiguous()] for step in steps}
        self.positions = [torch.arange(length)]


def stage_name(layer: int, half: str) -> str:
    """Return the name of a half of a layer, such as "layer 3 attention"."""
    return f"layer {layer} {half}"


def whole(part: Tensor, tp: Group | None, start: int | None = None) -> Tensor:
    """Return the numbers [T, n, ...] of all ranks, in their order, of a `part` [T, m, ...] that this rank has.

    tp      ranks that share them; None: this rank has all. Every rank makes the call
    start   index of the part in the whole: ranks with the same one have copies. None: there are no copies
    """
    if tp is None:
        return part
    own = torch.tensor([part.shape[1], tp.rank if start is None else start], device=part.device)
    counts, starts = tp.all_gather(own).t().tolist()
    parts = tp.gather_rows(part.transpose(0, 1).contiguous(), counts).split(counts)
    return torch.cat(list(dict(zip(starts, parts, strict=True)).values())).transpose(0, 1)


def pieces_of(result: Tensor, parts: Sequence[Part], tp: Group | None) -> list[Tensor]:
    """Return the numbers of all ranks for each part of a fused projection, of this rank's `result` [T, rows]."""
    each = zip(parts, result.split([part.rows for part in parts], 1), strict=True)
    return [whole(piece, tp, part.start) for part, piece in each]


def on_result(module: Any, keep: Any, step: str, tp: Group | None = None) -> None:
    """Record the result of a module. tp: ranks that have parts of it"""
    module.register_forward_hook(lambda module, given, result: keep(step, whole(result, tp)))


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
        keep(given, whole(x, linear.tp))
        keep(step, add(x.clone(), torch.zeros_like(residual), ctx))
        result: Tensor = add(x, residual, ctx)
        return result

    def tapped_alone(x: Tensor, ctx: StepContext) -> Tensor:
        keep(given, whole(x, linear.tp))
        result: Tensor = summed(x, ctx)
        keep(step, result)
        return result

    linear.add, linear.summed = tapped, tapped_alone
