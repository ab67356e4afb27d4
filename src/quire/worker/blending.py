"""Steps that reuse KV of other positions (CacheBlend): all rows in the first layers, chosen rows in the last ones.

The check layer tells how far the moved KV of each token is from its new KV. Later layers get the moved KV first, then
compute the chosen rows alone, which overwrite theirs. The host knows how many rows are chosen, the device knows which.

Ranks keep the same rows. Under tensor parallelism they add up the distances of their heads. In a pipeline the stage
with the check layer chooses, and each stage sends the numbers of the rows to the next one. Replicas in lock-step need
to know nothing: the rows of a step are an upper bound of those that its last layers compute.

A drafter makes its KV of the states of the token before. Where a token has none, because its layers did not run, the
drafter's KV is moved from the text, too. A draft model reads tokens alone, so it computes all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.args.check_layer import check_layer
from quire.contracts.step import FIRST_TOKENS, I32, StepPlan
from quire.distributed.mesh import ALONE, RankGroups
from quire.kernels.attention import AttentionMeta, KVView, Prompt
from quire.kernels.blend import latent_sides
from quire.kernels.blend.choice import Span, choose_rows
from quire.kernels.host_copies import sent_array
from quire.kernels.latent import LatentView
from quire.kernels.rope.rotary import Rotaries, Turns
from quire.kernels.step import StepBuffers, StepWords
from quire.layers.attention import Attention
from quire.layers.context import StepContext
from quire.layers.eagle import EagleLayer
from quire.layers.latent import LatentAttention
from quire.layers.stack import Model, run_layers
from quire.worker.features import Layers, StepFeature
from quire.worker.recorder import StepShape

Mixer = Attention | LatentAttention


@dataclass(frozen=True)
class StepRows:
    """The rows of a step.

    moved            [N] int64, rows of moved tokens, ascending
    sources          [groups, N] int64, of these: see `BlendedChunk`
    shifts           [N] int64, of these
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


class Places(NamedTuple):
    """The moved tokens in a layer, [N]: slots that are read and written, and the cos and sin [N, D] of its rotation."""

    sources: Tensor
    targets: Tensor
    cos: Tensor
    sin: Tensor


class MovedRows(NamedTuple):
    """The rows of a step, and those of them that the last layers have computed, until the features are done with it.

    kept      [K] int64
    targets   of each KV group, [N] slots of the moved tokens
    """

    rows: StepRows
    kept: Tensor
    targets: list[Tensor]


class Blending(StepFeature):
    """Runs the layers of steps with moved tokens. Such a step runs eagerly.

    kv       view of the KV cache of each layer of this rank
    groups   groups of ranks that this rank belongs to
    """

    def __init__(self, model: Model, kv: list[KVView], groups: RankGroups = ALONE) -> None:
        self._model, self._operations, self._groups = model, model.kernels.blend, groups
        self._sides = [latent_sides(view) if isinstance(view, LatentView) else view for view in kv]
        check = check_layer(model.args)
        self._num_first = min(len(model.layers), max(0, check + 1 - model.numbers.start))
        self._checks, self._chooses = check in model.numbers, check < model.numbers.stop
        self._keeps = [model.args.kept_by(number) == number for number in model.numbers]  # KV of its own
        self._drafts = list(_drafting(model))
        self._moved: MovedRows | None = None  # of a step that the other features have not seen to its end

    def fit(self, plan: StepPlan, shape: StepShape) -> StepShape:
        """Return the shape; a step with moved tokens runs eagerly."""
        return replace(shape, eager=True) if plan.features.blended else shape

    def run_layers(self, plan: StepPlan, hidden: Tensor, ctx: StepContext, layers: Layers) -> Tensor | None:
        """Run all layers of a step with moved tokens on hidden [T, hidden] and return it; None for other steps.

        Rows that the last layers leave out are 0.
        """
        if not plan.features.blended:
            return None
        model, rows = self._model, _rows(plan, hidden.device)
        hidden = run_layers(model, hidden, ctx, range(self._num_first))
        if not self._chooses:
            return hidden  # a later stage does
        targets, turns = [meta.kv_slots[rows.moved] for meta in ctx.attention], model.rotary.differences(rows.shifts)
        kept, later = self._kept_rows(rows, targets, turns, ctx.positions), range(self._num_first, len(model.layers))
        for layer in later:
            if self._keeps[layer]:
                self._operations.move(self._sides[layer], *_places(_attention(model, layer), rows, targets, turns))
        chosen = run_layers(model, hidden[kept], _context(ctx, kept, rows.counts), later)
        self._moved = MovedRows(rows, kept, targets)
        if model.reads is not None:
            model.reads.spread(kept, len(hidden))
        return torch.zeros_like(hidden).index_copy_(0, kept, chosen)

    def layers_done(
        self, step: StepWords, buffers: StepBuffers, hidden: Tensor, ctx: StepContext, shape: StepShape
    ) -> None:
        """Tell the next stage which rows are kept, behind the states that it gets; the last moves KV of drafts."""
        moved, self._moved = self._moved, None
        if moved is None:
            return
        if not self._model.last:
            assert self._groups.pp is not None, "another stage has the last layers"
            self._groups.pp.send(moved.kept, self._groups.pp.rank + 1)
            return
        for view, (attention, rotary) in zip(self._sides[len(self._model.layers) :], self._drafts, strict=False):
            places = _places(attention, moved.rows, moved.targets, rotary.differences(moved.rows.shifts))
            follows = torch.zeros(len(hidden) + 1, dtype=torch.bool, device=hidden.device)
            follows[moved.kept + 1] = True  # these have entries of their own: moves go to the block of padding
            targets = places.targets.masked_fill(follows[moved.rows.moved], 0)
            self._operations.move(view, *places._replace(targets=targets))

    def _kept_rows(self, rows: StepRows, targets: list[Tensor], turns: Turns, positions: Tensor) -> Tensor:
        """Return the rows [K] of a step that the last layers compute: chosen here, or by an earlier stage."""
        if not self._checks:
            pp, kept = self._groups.pp, torch.empty(int(rows.counts.sum()), dtype=torch.int64, device=positions.device)
            assert pp is not None, "another stage has the check layer"
            return pp.receive(kept, pp.rank - 1)
        check = self._num_first - 1
        places = _places(_attention(self._model, check), rows, targets, turns)
        deviations = self._operations.deviation(self._sides[check], *places)
        if self._groups.tp is not None:  # every rank has some heads; all add in the same order
            deviations = self._groups.tp.all_gather(deviations).sum(0)
        return self.choose(rows, deviations, positions)

    def choose(self, rows: StepRows, deviations: Tensor, positions: Tensor) -> Tensor:
        """Return the rows [K] of a step that the last layers compute: new tokens, and moved ones far from their KV.

        deviations   [N] of the moved KV from the new KV in the check layer
        positions    [T] of the rows of the step
        """
        places = positions[rows.moved] - rows.shifts  # in the chunk
        return choose_rows(deviations, places < FIRST_TOKENS, rows.moved, rows.spans, rows.others)


def _attention(model: Model, layer: int) -> Mixer:
    attention: Mixer = model.layers[layer].attention  # no model with states is blended
    return attention


def _drafting(model: Model) -> Iterator[tuple[Mixer, Rotaries]]:
    """Yield the attention of the layers that draft of the model's states, and their rotations."""
    for layer in model.drafts:
        yield layer.block.attention, model.rotary
    if model.draft is not None and isinstance(model.draft.layers[0], EagleLayer):
        yield model.draft.layers[0].attention, model.draft.rotary


def _places(attention: Mixer, rows: StepRows, targets: list[Tensor], turns: Turns) -> Places:
    """Return the places of the moved tokens in a layer. targets, turns: of each KV group, of each rotation"""
    return Places(rows.sources[attention.group], targets[attention.group], *turns[attention.turn])


def _context(ctx: StepContext, kept: Tensor, counts: I32) -> StepContext:
    """Return the context of the rows `kept`. counts: [S] rows of each sequence."""
    ends = np.cumsum(counts)
    starts = sent_array(np.concatenate(([0], ends)).astype(np.int32), kept.device)
    positions = ctx.positions[kept]

    def placed(prompts: tuple[Prompt, ...]) -> Iterator[Prompt]:
        for first, last, sequence, past in prompts:
            if count := int(counts[sequence]):
                end = int(ends[sequence])
                yield end - count, end, sequence, past + last - first - count

    def chosen(meta: AttentionMeta) -> AttentionMeta:
        return replace(
            meta,
            query_start=starts,
            kv_slots=meta.kv_slots[kept],
            row_positions=positions,
            decode_len=0,
            max_query_len=int(counts.max()),
            shared=None,
            prompts=None if meta.prompts is None else tuple(placed(meta.prompts)),
            plans={},
        )

    live, replicas = None if ctx.live is None else ctx.live[kept], ctx.replicas
    if replicas is not None:
        replicas = replace(replicas, count=sent_array(np.array([counts.sum()], np.int32), kept.device))
    return replace(
        ctx,
        positions=positions,
        attention=tuple(chosen(meta) for meta in ctx.attention),
        live=live,
        inputs=None if ctx.inputs is None else ctx.inputs[kept],
        replicas=replicas,
        adapters=None if ctx.adapters is None else ctx.adapters.chosen(kept),
    )


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
    sources = np.concatenate([chunk.sources for chunk in chunks], axis=1)
    shifts = np.concatenate([chunk.shifts for chunk in chunks])
    sent = [sent_array(table.astype(np.int64), device) for table in (moved, sources, shifts, others)]
    return StepRows(*sent, spans=spans, counts=counts)
