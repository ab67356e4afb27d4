"""The passes of a drafter with layers: a prediction layer of the model, a draft model, or an EAGLE head."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from quire.kernels.attention import KVView
from quire.layers.context import StepContext
from quire.layers.decoder import Decoder, Recurrent
from quire.layers.stack import Model, embedded, run_layers
from quire.spec.step_choice import StepChoice

Write = Callable[[Tensor], None]


class Pass(Protocol):
    """Layers that draft. Shapes: D decodes, T rows of a pass.

    width       of the states that are kept of the model
    groups      KV groups of the layers, ascending
    recurrent   True: some layers are recurrent, and keep states of their own
    shared      True: replicas in lock-step share experts of the layers
    """

    width: int
    recurrent: bool
    groups: tuple[int, ...]
    shared: bool

    def keep(self, hidden: Tensor, ctx: StepContext) -> Tensor:
        """Return the states [T, width] to keep of the output of the model's layers, before the final norm."""

    def run(self, token_ids: Tensor, states: Tensor, ctx: StepContext, write: Write | None = None) -> Tensor:
        """Write the cache entries of tokens [T], with the states [T, width] before them. Return the output [T, .].

        write   writes over rows of the model's embeddings of the tokens; a draft model has an embedding of its own
        """

    def state(self, out: Tensor) -> Tensor:
        """Return the states [D, .] of rows of the output, which `logits` takes, and the next pass."""

    def logits(self, state: Tensor) -> Tensor:
        """Return the logits [D, V] of the drafts, of this rank's slice of the vocabulary."""

    def choice(self) -> StepChoice | None:
        """Return what the passes of a step share of the tokens that the first one chooses; None: nothing."""
        return None

    def join(self, ctx: StepContext) -> None:
        """Take part in the exchanges of a pass in which this replica has no rows, and others have."""


class PredictionPass(Pass):
    """A pass of the model's prediction layer. A `Pass`. Its states are the model's, after the final norm."""

    recurrent = False

    def __init__(self, model: Model, kv: list[KVView]) -> None:
        self._model, self._layer, self._kv = model, model.drafts[0], kv[0]
        self.width, self.groups = model.args.hidden_size, (self._layer.block.attention.group,)
        self.shared = self._layer.block.shares_experts

    def keep(self, hidden: Tensor, ctx: StepContext) -> Tensor:
        """Return the states to keep. See `Pass`."""
        return self._model.norm(hidden)

    def run(self, token_ids: Tensor, states: Tensor, ctx: StepContext, write: Write | None = None) -> Tensor:
        """Run the layer. See `Pass`."""
        turns = self._model.rotary.rows(ctx.positions, states.dtype)
        return self._layer(_embedded(self._model, token_ids, write), states, turns, ctx, self._kv)

    def state(self, out: Tensor) -> Tensor:
        """Return the states of rows. See `Pass`."""
        return self._layer.norm(out)

    def logits(self, state: Tensor) -> Tensor:
        """Return the logits of the drafts. See `Pass`."""
        return self._model.head(state)

    def choice(self) -> StepChoice | None:
        """Return a choice for a step, if the checkpoint's passes share one. See `Pass`."""
        args = self._model.args
        shared = args.prediction.shared_choice(args.layers) is not None
        return StepChoice(self._model.kernels.index, self.groups[0]) if shared else None

    def join(self, ctx: StepContext) -> None:
        """Run this rank's experts of the layer for other replicas. See `Pass`."""
        self._layer.block.join(ctx)


class HeadPass(Pass):
    """A pass of an EAGLE head. A `Pass`. Its states are the model's: after the final norm, or between several layers,
    joined (EAGLE-3)."""

    recurrent = shared = False

    def __init__(self, model: Model, head: Decoder, kv: list[KVView]) -> None:
        self._model, self._head, self._kv = model, head, kv[0]
        (self._layer,) = head.layers
        self._normed = head.args.eagle is not None and head.args.eagle.norm_output
        self.width, self.groups = model.args.hidden_size, (self._layer.attention.group,)

    def keep(self, hidden: Tensor, ctx: StepContext) -> Tensor:
        """Return the states to keep. See `Pass`."""
        return self._layer.joined(hidden, ctx) if self._head.last else self._model.norm(hidden)

    def run(self, token_ids: Tensor, states: Tensor, ctx: StepContext, write: Write | None = None) -> Tensor:
        """Run the layer. See `Pass`."""
        turns = self._head.rotary.rows(ctx.positions, states.dtype)
        return self._layer(_embedded(self._model, token_ids, write), states, turns, ctx, self._kv)

    def state(self, out: Tensor) -> Tensor:
        """Return the rows as they are, or after the head's final norm. See `Pass`."""
        return self._head.norm(out) if self._normed else out

    def logits(self, state: Tensor) -> Tensor:
        """Return the logits of the drafts: of the model's head, or of an EAGLE-3 head's own. See `Pass`."""
        if not self._head.last:
            return self._model.head(state)
        normed, ids = state if self._normed else self._head.norm(state), self._head.ids
        if ids is None:
            return _sliced(self._head.head(normed), self._head, self._model)
        return ids.spread(self._head.head.whole(normed), self._model.vocabulary)

    def join(self, ctx: StepContext) -> None:
        """Do nothing: a head has no experts. See `Pass`."""


class ModelPass(Pass):
    """A pass of a draft model, which sees tokens alone. A `Pass`. `target`: the model for which it drafts"""

    width = 0

    def __init__(self, target: Model, model: Model, kv: list[KVView]) -> None:
        self._target, self._model, self._kv = target, model, kv
        mixers = [layer.attention for layer in model.layers if not isinstance(layer.attention, Recurrent)]
        self.groups = tuple(sorted({one.group for one in mixers if one is not None}))
        self.recurrent = model.args.keeps_states
        self.shared = any(layer.shares_experts for layer in model.layers)

    def keep(self, hidden: Tensor, ctx: StepContext) -> Tensor:
        """Return states without numbers. See `Pass`."""
        return hidden[:, :0]

    def run(self, token_ids: Tensor, states: Tensor, ctx: StepContext, write: Write | None = None) -> Tensor:
        """Run all layers. See `Pass`."""
        hidden, own = embedded(self._model, token_ids, replace(ctx, kv=self._kv))
        return run_layers(self._model, hidden, own)

    def state(self, out: Tensor) -> Tensor:
        """Return the rows after the final norm. See `Pass`."""
        return self._model.norm(out)

    def logits(self, state: Tensor) -> Tensor:
        """Return the logits of the drafts. See `Pass`."""
        return _sliced(self._model.head(state), self._model, self._target)

    def join(self, ctx: StepContext) -> None:
        """Run this rank's experts of all layers for other replicas. See `Pass`."""
        for layer in self._model.layers:
            layer.join(ctx)


def _embedded(model: Model, token_ids: Tensor, write: Write | None) -> Tensor:
    """Return the model's embeddings [T, hidden] of tokens, some of which `write` replaces."""
    embeddings: Tensor = model.embed(token_ids)
    if write is not None:
        write(embeddings)
    return embeddings


def _sliced(logits: Tensor, drafter: Model, target: Model) -> Tensor:
    """Return the logits of the slice of the vocabulary that this rank has of the model, of which it may have the whole
    drafter."""
    if target.vocabulary is None or drafter.vocabulary is not None:
        return logits
    return logits[:, target.vocabulary.first :][:, : target.vocabulary.count].contiguous()
