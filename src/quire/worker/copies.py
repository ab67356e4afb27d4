"""The copies of KV blocks between tiers, as a step feature: jobs that a plan names begin before or after its step."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quire.contracts.step import I32, StepPlan
from quire.kernels.step import StepBuffers
from quire.kernels.step.upload import Change
from quire.kvstore.mover import BlockMover
from quire.worker.features import StepFeature


class TierCopies(StepFeature):
    """Begins the copy jobs of plans, and reports those that have ended. No step waits for a job.

    mover   runs the jobs of this rank
    """

    def __init__(self, mover: BlockMover) -> None:
        self.mover, self.parts = mover, (mover,)

    def apply(self, plan: StepPlan) -> list[Change]:
        """Begin the jobs that come before the step: all earlier steps are launched."""
        if plan.copies is not None:
            self.mover.begin(plan.copies.before)
        return []

    def after(self, plan: StepPlan, rows: I32, buffers: StepBuffers, out: Tensor) -> None:
        """Begin the jobs that come after the step."""
        if plan.copies is not None:
            self.mover.begin(plan.copies.after)

    def results(self, plan: StepPlan, counts: I32 | None, words: I32) -> Mapping[str, Any]:
        """Return the reports of the jobs that have ended."""
        return {"copied": self.mover.finished(wait=plan.copies is not None and plan.copies.wait)}
