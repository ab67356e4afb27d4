"""The result of a step: from the device's tokens and codes to a `StepResult`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.contracts.step import I32, SAMPLE, StepPlan, StepResult
from quire.kernels.sampling.sampler import CODES
from quire.worker.features import Hooked, Results


@dataclass(frozen=True)
class RunningStep:
    """A step that is launched and not collected yet.

    slots       [N] int32 slots that sample
    num_tokens  tokens that the step computes
    fetch       function that waits for the step; returns [3, >= R]: tokens, error codes and drafts of the sampled rows
    found       functions that return the results of step features (pooling, log-probabilities)
    counts      [N] int32 sampled rows of each slot: the last token of a decode and its drafts; None: one each
    """

    plan: StepPlan
    slots: I32
    num_tokens: int
    fetch: Callable[[], I32]
    found: tuple[Results, ...] = ()
    counts: I32 | None = None

    def collect(self, features: Hooked = ()) -> StepResult:
        """Wait for the step and return its result. `features`: those with fields of the result."""
        count, words = len(self.slots), self.fetch()
        firsts = slice(count) if self.counts is None else np.cumsum(self.counts) - self.counts
        codes = words[1, firsts]
        failed = {int(self.slots[row]): CODES[int(codes[row])] for row in np.flatnonzero(codes)} if codes.any() else {}
        found: dict[str, Any] = {"failed": failed}
        for results in self.found:
            for name, by_slot in results().items():
                found.setdefault(name, {}).update(by_slot)
        known: dict[str, Any] = {"tokens": words[0, firsts, None].copy(), "num_accepted": np.ones(count, np.int32)}
        for feature in features:
            known.update(feature.results(self.plan, self.counts, words))
        if self.counts is not None and (logprobs := found.get("logprobs")):
            valid = dict(zip(self.slots.tolist(), known["num_accepted"].tolist(), strict=True))
            found["logprobs"] = {slot: rows.part(slice(valid[slot])) for slot, rows in logprobs.items()}
        return StepResult(step=self.plan.step, slots=self.slots, num_computed=self.num_tokens, **known, **found)


def sampled_slots(plan: StepPlan) -> tuple[I32, I32 | None, I32]:
    """Return the slots [N] of a plan that sample, the number of sampled rows of each [N] (None: one row each), and the
    slot of each row [R].
    """
    sampled = plan.num_decodes == len(plan.slots)
    slots = plan.slots if sampled else plan.slots[(plan.outputs & SAMPLE) != 0]
    rows = plan.num_tokens[: plan.num_decodes]
    if not (rows > 1).any():
        return slots, None, slots
    counts = np.ones(len(slots), np.int32)
    counts[: plan.num_decodes] = rows
    return slots, counts, np.repeat(slots, counts)
