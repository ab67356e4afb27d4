"""A stage of a pipeline: hidden states come from the stage before and go to the next; tokens go back to the first.

With them go the tokens that an indexer has chosen, if the first layer of the next stage attends to these, and the
states between layers that an EAGLE-3 head on the last stage reads.

A slot samples in one step in flight at a time, so the first stage needs a token only when the slot's next step comes.
Until then it owes the token to its history.
"""

from collections import deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.args.latent import IndexArgs, LatentArgs
from quire.contracts.step import I32, StepPlan
from quire.distributed import Group
from quire.kernels.index import Chosen
from quire.kernels.step import StepBuffers, StepWords, Tables
from quire.kernels.step.upload import Change
from quire.layers.context import StepContext
from quire.layers.latent import LatentAttention
from quire.layers.stack import Model
from quire.worker.features import StepFeature
from quire.worker.recorder import StepShape


@dataclass(frozen=True)
class _Owed:
    """Tokens of a step that the last stage sampled: their slots, on host and device, and their positions."""

    known: frozenset[int]
    slots: Tensor
    positions: Tensor


def _shared(model: Model, layer: int) -> IndexArgs | None:
    """Return the indexer of an earlier layer that a layer shares; None: it shares none, or there is no such layer."""
    own = model.args.layers[layer].mixer if layer < model.args.num_layers else None
    index = own.index if isinstance(own, LatentArgs) else None
    return index if index is not None and index.shared else None


class PipelineStage(StepFeature):
    """Exchanges of one pipeline-parallel rank with the other stages.

    forward   group of the pipeline's ranks that sends hidden states to the next stage
    back      group of the same ranks that sends sampled tokens from the last stage to the first
    tables    device tables of this rank; the first stage writes the tokens to their token history
    told      True: plans tell the sampled tokens, because the engine drafts (`stage_drafts.py`), and none are sent back
    first     True on the first stage, which has the embedding;  last  True on the last stage, which has the LM head
    """

    def __init__(self, model: Model, forward: Group, back: Group, tables: Tables, *, told: bool = False) -> None:
        self._model, self._forward, self._back, self._tables, self._told = model, forward, back, tables, told
        self._owed: deque[_Owed] = deque()
        self.first, self.last = forward.rank == 0, forward.rank == forward.size - 1
        self._read, self._sent = (_shared(model, layer) for layer in (model.numbers.start, model.numbers.stop))

    def apply(self, plan: StepPlan) -> list[Change]:
        """Receive the tokens that the last stage sampled for the plan's slots; write them to the token history.

        Only the first stage receives tokens, and only when the slots are used, released or admitted again.
        """
        if self._owed:
            used = {*plan.slots.tolist(), *plan.released.tolist(), *(one.slot for one in plan.admitted)}
            self._receive(max((i for i, owed in enumerate(self._owed) if owed.known & used), default=-1) + 1)
        return []

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the input [T, hidden] of this stage's layers: embedded tokens, or received from the stage before."""
        model = self._model
        if self.first:
            return model.embed(token_ids)
        count = 0 if model.reads is None else model.reads.num_got
        shape = 1 + count, len(token_ids), model.args.hidden_size
        came = torch.empty(shape, dtype=model.dtype, device=token_ids.device)
        came = self._forward.receive(came, self._forward.rank - 1)
        if model.reads is not None:
            model.reads.give(came[1:])
        return came[0]

    def context(self, ctx: StepContext, shape: StepShape) -> StepContext:
        """Return the context with the tokens that an indexer of a stage before has chosen, if layers here read them."""
        if self._read is None:
            return ctx
        attention = self._model.layers[0].attention
        assert isinstance(attention, LatentAttention), "it attends to chosen tokens"
        meta, rows = ctx.attention[attention.group], len(ctx.positions)
        chosen: Chosen = self._model.kernels.index.room(rows, meta, self._read.top_k, ctx.positions.device)
        if len(chosen.positions):
            self._forward.receive(chosen.positions, self._forward.rank - 1)
        return replace(ctx, chosen=chosen)

    def layers_done(
        self, step: StepWords, buffers: StepBuffers, hidden: Tensor, ctx: StepContext, shape: StepShape
    ) -> None:
        """Send the output of this stage's layers, [T, hidden], to the next stage, with states for an EAGLE-3 head."""
        if self._sent is not None:
            assert ctx.chosen is not None, "a layer before the shared one has an indexer"
            if len(ctx.chosen.positions):
                self._forward.send(ctx.chosen.positions, self._forward.rank + 1)
        if not self.last:
            reads = self._model.reads
            self._forward.send(hidden[None] if reads is None else reads.behind(hidden), self._forward.rank + 1)

    def after(self, plan: StepPlan, rows: I32, buffers: StepBuffers, out: Tensor) -> None:
        """End a step that sampled tokens for the slots `rows`.

        The last stage sends the tokens out[0] to the first. The first notes that it must receive them; see `apply`.
        """
        count = 0 if self._told else len(rows)
        if count and self.last:
            self._back.post(out[0, :count], 0)
        elif count and self.first:
            places = buffers.sample_slots[:count].clone(), buffers.sample_positions[:count].clone()
            self._owed.append(_Owed(frozenset(rows.tolist()), *places))

    def settle(self) -> None:
        """Receive all sampled tokens that are still to come."""
        self._receive(len(self._owed))

    def _receive(self, count: int) -> None:
        """Write the tokens of the oldest steps that are owed."""
        for _ in range(count):
            owed = self._owed.popleft()
            tokens = torch.empty(len(owed.slots), dtype=torch.int32, device=owed.slots.device)
            self._tables.history[owed.slots, owed.positions] = self._back.receive(tokens, self._back.size - 1)
