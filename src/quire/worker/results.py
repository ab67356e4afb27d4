"""The result of a step: from the device's tokens and codes to a `StepResult`."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.contracts.step import I32, SAMPLE, StepPlan, StepResult
from quire.kernels.sampling.sampler import CODES
from quire.worker.features import Found, Results


@dataclass(frozen=True)
class RunningStep:
    """A step that is launched and not collected yet.

    slots       [N] int32 slots that sample
    num_tokens  tokens that the step computes
    fetch       function that waits for the step; returns [3, >= R]: tokens, error codes and drafts of the sampled rows
    features    functions that return the results of step features (pooling, log-probabilities)
    counts      [N] int32 sampled rows of each slot: the last token of a decode and its drafts; None: one each
    """

    plan: StepPlan
    slots: I32
    num_tokens: int
    fetch: Callable[[], I32]
    features: tuple[Results, ...] = ()
    counts: I32 | None = None

    def collect(self) -> StepResult:
        """Wait for the step and return its result."""
        count, words = len(self.slots), self.fetch()
        tokens, codes = words[0, :count, None].copy(), words[1, :count]
        accepted, drafted = np.ones(count, np.int32), np.empty(0, np.int32)
        if self.counts is not None:
            tokens, codes, accepted, drafted = _verified(words, self.counts)
        failed = {int(self.slots[row]): CODES[int(codes[row])] for row in np.flatnonzero(codes)} if codes.any() else {}
        found: Found = {"failed": failed}
        for results in self.features:
            for name, by_slot in results().items():
                found.setdefault(name, {}).update(by_slot)
        if self.counts is not None and (logprobs := found.get("logprobs")):
            valid = dict(zip(self.slots.tolist(), accepted.tolist(), strict=True))
            found["logprobs"] = {slot: rows.part(slice(valid[slot])) for slot, rows in logprobs.items()}
        return StepResult(
            step=self.plan.step,
            slots=self.slots,
            tokens=tokens,
            num_accepted=accepted,
            num_drafted=drafted,
            num_computed=self.num_tokens,
            **found,
        )


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


def _verified(words: I32, counts: I32) -> tuple[I32, I32, I32, I32]:
    """Accept the drafts of a step, by the rule of `quire.kernels.step`: the device has accepted the same.

    words    [3, >= R] tokens, codes and drafts of the sampled rows
    counts   [N] rows of each slot
    Returns tokens [N, 1+k], the code of each first row [N], and the numbers of valid tokens and of drafts made [N].
    """
    ends = np.cumsum(counts)
    rows = np.arange(counts.max())
    tokens, codes, drafts = words[:, np.minimum((ends - counts)[:, None] + rows, ends[:, None] - 1)]
    verified = rows < counts[:, None] - 1  # rows with a draft behind them
    equal = verified & (tokens == drafts)
    equal[:, :-1] &= codes[:, 1:] == 0
    accepted = 1 + np.logical_and.accumulate(equal, 1).sum(1, dtype=np.int32)
    return tokens, codes[:, 0], accepted, (verified & (drafts >= 0)).sum(1, dtype=np.int32)
