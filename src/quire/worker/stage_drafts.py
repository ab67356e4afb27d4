"""Speculative decoding in a pipeline, as step features: the last stage drafts at the end of a step, and the plan of a
later step tells all stages what came of it.

    step N, last stage    the draft t5 is right, and t6 is sampled; drafts d7 d8 behind t6. All go to the engine core
    step N + 1, plan      t5 t6 d7 d8 of the slot, which every stage writes to its token history

A slot is in one step in flight at a time, so the host knows all of its tokens when it plans its next step.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.contracts.step import I32, StepPlan
from quire.kernels.host_copies import fetched, sent_array
from quire.kernels.step import NUM_DECODES, StepBuffers, StepWords, Tables, fixed_words
from quire.kernels.step.upload import Change
from quire.layers.context import StepContext
from quire.spec.drafter import Drafter
from quire.worker.features import StepFeature
from quire.worker.recorder import StepShape
from quire.worker.results import sampled_slots
from quire.worker.step_drafts import accept

NO_DRAFTS: I32 = np.empty((0, 0), np.int32)


class StageTokens(StepFeature):
    """Writes the tokens and drafts that a plan tells to the token history of this stage."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def apply(self, plan: StepPlan) -> list[Change]:
        """Return the table changes: tokens of the slots that decode, and the numbers of their computed tokens."""
        runs, tables, changes = plan.features.runs, self._tables, list[Change]()
        if runs is None:
            return changes
        width, parts = tables.history.shape[1], np.split(runs.tokens, np.cumsum(runs.counts)[:-1])
        places = zip(runs.slots.tolist(), runs.begins.tolist(), runs.lengths.tolist(), parts, strict=False)
        for slot, begin, length, tokens in places:
            changes.append(Change(tables.history, slot * width + begin, np.ascontiguousarray(tokens, np.int32)))
            changes.append(Change(tables.computed, 2 * slot, np.array([length - 1], np.int64).view(np.int32)))
        return changes


class StageDrafts(StageTokens):
    """The drafts of the last stage. It makes them at the end of a step for the slots that the step has sampled.

    drafter   makes the drafts
    most      most drafts of a slot
    """

    def __init__(self, drafter: Drafter, tables: Tables, most: int) -> None:
        super().__init__(tables)
        slots, device = len(tables.computed), tables.computed.device
        self.drafter, self.parts = drafter, (drafter,)
        self._step = StepWords.view(torch.zeros(fixed_words(slots - 1), dtype=torch.int32, device=device), slots - 1)
        self._free = replace(tables, hosted=torch.zeros_like(tables.hosted))
        self._ahead = torch.arange(most, device=device)
        self._made: deque[Callable[[], I32]] = deque()  # returns the drafts of a step that is not collected

    def apply(self, plan: StepPlan) -> list[Change]:
        """Return the table changes, with those of the drafter for the admitted requests."""
        return [*super().apply(plan), *(Change(*one) for one in self.drafter.admit(plan.admitted))]

    def layers_done(
        self, step: StepWords, buffers: StepBuffers, hidden: Tensor, ctx: StepContext, shape: StepShape
    ) -> None:
        """Launch what the drafter makes of the output of the layers."""
        self.drafter.follow(step, buffers, hidden, ctx, decode=shape.decode)

    def after(self, plan: StepPlan, rows: I32, buffers: StepBuffers, out: Tensor) -> None:
        """Launch the drafts behind the tokens of the step."""
        runs = plan.features.runs
        if runs is not None and runs.num_drafting:
            self._made.append(fetched(self._draft(sampled_slots(plan)[0], runs.limits, runs.most)))
            return
        if self.drafter.joint is not None:
            self.drafter.joint.join_drafts()
        self._made.append(lambda: NO_DRAFTS)

    def results(self, plan: StepPlan, counts: I32 | None, words: I32) -> Mapping[str, Any]:
        """Return the numbers of accepted drafts of the step, and the drafts behind its tokens."""
        ahead = self._made.popleft()()
        return {"ahead": ahead} | ({} if counts is None else accept(counts, words)._asdict())

    def _draft(self, sampled: I32, limits: I32, longest: int) -> Tensor:
        """Launch the drafts of sampled slots [N]. Return them [N, longest], int32; -1: there is none.

        limits    see `StageRuns`;  longest  most drafts of a slot
        """
        device, chosen = self._ahead.device, np.flatnonzero(limits)
        places = np.stack([sampled[chosen], limits[chosen], chosen]).astype(np.int64)
        slots, ends, rows = sent_array(places, device)
        step, count, tables = self._step, len(chosen), self._free
        known = tables.computed[slots]  # position of the last token
        most = (ends - known - 1).clamp_(0, longest)
        step.slots[:count] = slots
        step.starts[1 : count + 1] = (1 + most).cumsum(0)
        step.words[NUM_DECODES] = step.num_decodes = step.num_seqs = count
        self.drafter.draft(step, tables, count, longest)
        ahead = self._ahead[:longest]
        positions = (known[:, None] + 1 + ahead).clamp_(max=tables.history.shape[1] - 1)
        found = torch.full((len(sampled), longest), -1, dtype=torch.int32, device=device)
        found[rows] = torch.where(ahead < most[:, None], tables.history[slots[:, None], positions], -1)
        return found
