"""Speculative decoding as a step feature: drafts before the inputs of a step, acceptance when its tokens have come."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from quire.contracts.step import I32, StepPlan
from quire.kernels.step import StepBuffers, StepWords, Tables
from quire.kernels.step.upload import Change
from quire.layers.context import StepContext
from quire.spec.drafter import Drafter
from quire.worker.features import StepFeature
from quire.worker.recorder import StepShape


class Accepted(NamedTuple):
    """The verified drafts of a step, by slot.

    tokens         [N, 1+k] sampled tokens; the first `num_accepted` of each slot are valid
    num_accepted   [N] 1 + the number of accepted drafts
    num_drafted    [N] drafts that the drafter has made
    """

    tokens: I32
    num_accepted: I32
    num_drafted: I32

    def traced(self) -> str:
        """Return the counts for a trace."""
        accepted = int((self.num_accepted - 1).sum())
        return f"{int(self.num_drafted.sum())} drafted, {accepted} accepted"


class StepDrafts(StepFeature):
    """Makes drafts for the decodes of each step, and accepts those that the model would have sampled.

    It is its own `LateWork`, if the drafter can leave rows to a later pass.

    drafter   makes the drafts
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.parts = drafter, (drafter,)
        self.late = None if drafter.late is None else self
        self.most = 0 if drafter.late is None else drafter.late.most

    def apply(self, plan: StepPlan) -> list[Change]:
        """Return the table changes of the drafter for the admitted requests."""
        return [Change(*one) for one in self.drafter.admit(plan.admitted)]

    def overdue(self, plan: StepPlan, shape: StepShape) -> list[tuple[int, int]]:
        """Return the decodes whose rows the drafter must see before the step."""
        rows, count = self.drafter.late, plan.num_decodes
        if rows is None:
            return []
        decodes, prompts = plan.slots[:count], plan.slots[count:]
        late, completes = self._is_late(shape), plan.features.completes
        due = rows.step(decodes, plan.num_tokens[:count], prompts, late=late, completes=completes)
        begins = range(0, count, self.most)
        return [(begin, min(self.most, count - begin)) for begin in begins if due[begin : begin + self.most].any()]

    def catch_up(self, step: StepWords, tables: Tables, begin: int, seqs: int) -> None:
        """Launch the pass over the rows that the drafter has not seen."""
        self.drafter.catch_up(step, tables, begin, seqs)

    def _is_late(self, shape: StepShape) -> bool:
        """Return True for a step that leaves its rows to a later catch-up."""
        return shape.decode and shape.query == 1 and shape.seqs <= self.most

    def inputs(self, step: StepWords, tables: Tables, shape: StepShape) -> None:
        """Launch the drafts of the step's decodes."""
        if self._is_late(shape):
            return
        self.drafter.draft(step, tables, shape.seqs if shape.recorded else step.num_decodes, shape.query - 1)

    def layers_done(
        self, step: StepWords, buffers: StepBuffers, hidden: Tensor, ctx: StepContext, shape: StepShape
    ) -> None:
        """Launch what the drafter makes of the output of the layers."""
        if self._is_late(shape):
            self.drafter.keep(step, buffers, hidden, ctx)
            return
        self.drafter.follow(step, buffers, hidden, ctx, decode=shape.decode)

    def results(self, plan: StepPlan, counts: I32 | None, words: I32) -> Mapping[str, Any]:
        """Return the sampled tokens and the numbers of drafts and accepted ones; nothing for a step without drafts."""
        return {} if counts is None else accept(counts, words)._asdict()


def accept(counts: I32, words: I32) -> Accepted:
    """Accept the drafts of a step by the rule of `quire.kernels.step`: the device has accepted the same.

    counts   [N] sampled rows of each slot
    words    [3, >= R] tokens, error codes and drafts of the sampled rows
    """
    ends, rows = np.cumsum(counts), np.arange(counts.max())
    tokens, codes, drafts = words[:, np.minimum((ends - counts)[:, None] + rows, ends[:, None] - 1)]
    verified = rows < counts[:, None] - 1  # rows with a draft behind them
    equal = verified & (tokens == drafts)
    equal[:, :-1] &= codes[:, 1:] == 0
    accepted = 1 + np.logical_and.accumulate(equal, 1).sum(1, dtype=np.int32)
    return Accepted(tokens, accepted, (verified & (drafts >= 0)).sum(1, dtype=np.int32))
