"""Steps that reuse KV of other positions (CacheBlend): all rows in the first layers, chosen rows in the last ones.

The check layer tells how far the moved KV of each token is from its new KV. Later layers get the moved KV first, then
compute the chosen rows alone, which overwrite theirs. The host knows how many rows are chosen, the device knows which.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.contracts.step import CHECK_LAYER, FIRST_TOKENS, I32, StepPlan
from quire.kernels.attention import AttentionMeta, KVView
from quire.kernels.blend import latent_sides
from quire.kernels.blend.choice import Span, choose_rows
from quire.kernels.host_copies import sent_array
from quire.kernels.latent import LatentView
from quire.layers.context import StepContext
from quire.layers.stack import Model, run_layers
from quire.worker.features import Layers, StepFeature
from quire.worker.recorder import StepShape

I64 = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class StepRows:
    """The rows of a step.

    moved            [N] int64, rows of moved tokens, ascending
    sources, shifts  [N] int64, of these: see `BlendedChunk`
    others           [F] int64, the other rows, which are always kept
    spans            of each chunk, in `moved`: see `choose_rows`
    counts           [S] rows that each sequence keeps
    """

    moved: Tensor
    sources: Tensor
    shifts: Tensor
    others: Tensor
    spans: list[Span]
    counts: I32


class Blending(StepFeature):
    """Runs the layers of steps with moved tokens. Such a step runs eagerly.

    kv   view of the KV cache of each layer
    """

    def __init__(self, model: Model, kv: list[KVView]) -> None:
        self._model, self._operations = model, model.kernels.blend
        self._sides = [latent_sides(view) if isinstance(view, LatentView) else view for view in kv]

    def fit(self, plan: StepPlan, shape: StepShape) -> StepShape:
        """Return the shape; a step with moved tokens runs eagerly."""
        return replace(shape, eager=True) if plan.features.blended else shape

    def run_layers(self, plan: StepPlan, hidden: Tensor, ctx: StepContext, layers: Layers) -> Tensor | None:
        """Run all layers of a step with moved tokens on hidden [T, hidden] and return it; None for other steps.

        Rows that the last layers leave out hold the output of the check layer.
        """
        if not plan.features.blended:
            return None
        model, rows = self._model, _rows(plan, hidden.device)
        hidden = run_layers(model, hidden, ctx, range(CHECK_LAYER + 1))
        slots, turn = ctx.attention[0].kv_slots[rows.moved], model.rotary.differences(rows.shifts)
        deviations = self._operations.deviation(self._sides[CHECK_LAYER], rows.sources, slots, *turn)
        kept = self.choose(rows, deviations, ctx.positions)
        later = range(CHECK_LAYER + 1, len(model.layers))
        for layer in later:
            self._operations.move(self._sides[layer], rows.sources, slots, *turn)
        chosen = run_layers(model, hidden[kept], _context(ctx, kept, rows.counts), later)
        return hidden.index_copy(0, kept, chosen)

    def choose(self, rows: StepRows, deviations: Tensor, positions: Tensor) -> Tensor:
        """Return the rows [K] of a step that the last layers compute: new tokens, and moved ones far from their KV.

        deviations   [N] of the moved KV from the new KV in the check layer
        positions    [T] of the rows of the step
        """
        places = positions[rows.moved] - rows.shifts  # in the chunk
        return choose_rows(deviations, places < FIRST_TOKENS, rows.moved, rows.spans, rows.others)


def _context(ctx: StepContext, kept: Tensor, counts: I32) -> StepContext:
    """Return the context of the rows `kept`. counts: [S] rows of each sequence."""
    starts = sent_array(np.concatenate(([0], np.cumsum(counts))).astype(np.int32), kept.device)
    positions = ctx.positions[kept]

    def chosen(meta: AttentionMeta) -> AttentionMeta:
        return replace(
            meta,
            query_start=starts,
            kv_slots=meta.kv_slots[kept],
            row_positions=positions,
            decode_len=0,
            max_query_len=int(counts.max()),
            shared=None,
            prompts=None,
            plans={},
        )

    assert ctx.inputs is None, "no model with inputs of layers is blended"
    live = None if ctx.live is None else ctx.live[kept]
    adapters = None if ctx.adapters is None else ctx.adapters.chosen(kept)
    attention = tuple(chosen(meta) for meta in ctx.attention)
    return replace(ctx, positions=positions, attention=attention, live=live, adapters=adapters)


def _rows(plan: StepPlan, device: torch.device) -> StepRows:
    """Return the rows of a step with moved tokens."""
    counts, at = plan.num_tokens.copy(), {int(slot): index for index, slot in enumerate(plan.slots)}
    starts = np.cumsum(plan.num_tokens) - plan.num_tokens
    chunks = sorted(plan.features.blended, key=lambda chunk: at[chunk.slot])
    spans: list[Span] = []
    for chunk in chunks:
        first = spans[-1][1] if spans else 0
        spans.append((first, first + len(chunk.tokens), chunk.num_kept))
        counts[at[chunk.slot]] -= len(chunk.tokens) - chunk.num_kept
    moved = np.concatenate([starts[at[chunk.slot]] + chunk.tokens for chunk in chunks]).astype(np.int64)
    others = np.setdiff1d(np.arange(plan.num_tokens.sum()), moved, assume_unique=True)
    tables = moved, *(np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in ("sources", "shifts"))
    sent = [sent_array(table.astype(np.int64), device) for table in (*tables, others)]
    return StepRows(*sent, spans=spans, counts=counts)
