"""The result of a step: from the device's tokens and codes to a `StepResult`."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from quire.contracts.step import I32, StepPlan, StepResult, StepTimings
from quire.worker.features import Found, Results
from quire.worker.sampler import CODES


@dataclass(frozen=True)
class RunningStep:
    """A step that is launched and not collected yet.

    slots       [N] int32 slots of the sampled rows
    num_tokens  tokens that the step computes
    fetch       function that waits for the step; returns [2, >= N]: tokens and error codes of the sampled rows
    features    functions that return the results of step features (pooling, log-probabilities)
    began       host time when the step began; None: the host's clock does not measure steps
    forwarded   host time when the logits were launched
    """

    plan: StepPlan
    slots: I32
    num_tokens: int
    fetch: Callable[[], I32]
    features: tuple[Results, ...] = ()
    began: float | None = None
    forwarded: float = 0.0

    def collect(self) -> StepResult:
        """Wait for the step and return its result."""
        count, words = len(self.slots), self.fetch()
        tokens, codes = words[0, :count].copy(), words[1, :count]
        failed = {int(self.slots[row]): CODES[int(codes[row])] for row in np.flatnonzero(codes)} if codes.any() else {}
        found: Found = {"failed": failed}
        for results in self.features:
            for name, by_slot in results().items():
                found.setdefault(name, {}).update(by_slot)
        timings = StepTimings()
        if self.began is not None:
            timings = StepTimings(forward=self.forwarded - self.began, sample=perf_counter() - self.forwarded)
        return StepResult(
            step=self.plan.step,
            slots=self.slots,
            tokens=tokens[:, None],
            num_accepted=np.ones(count, np.int32),
            num_computed=self.num_tokens,
            timings=timings,
            **found,
        )
