"""The copies of KV blocks between tiers, as a step feature: jobs that a plan names begin before or after its step."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from quire.contracts.step import I32, CopyJob, StepPlan
from quire.kernels.step import StepBuffers
from quire.kernels.step.upload import Change
from quire.kvstore.mover import BlockMover
from quire.worker.features import StepFeature


class TierCopies(StepFeature):
    """Begins the copy jobs of plans, and reports those that have ended. No step waits for a job.

    mover    runs the jobs of this rank for KV blocks
    states   runs those for checkpoints of states, or None
    """

    def __init__(self, mover: BlockMover, states: BlockMover | None = None) -> None:
        self.mover, self.states = mover, states
        self.parts = (mover,) if states is None else (mover, states)

    def apply(self, plan: StepPlan) -> list[Change]:
        """Begin the jobs that come before the step: all earlier steps are launched."""
        if plan.copies is not None:
            self._begin(plan.copies.before)
        return []

    def after(self, plan: StepPlan, rows: I32, buffers: StepBuffers, out: Tensor) -> None:
        """Begin the jobs that come after the step."""
        if plan.copies is not None:
            self._begin(plan.copies.after)

    def results(self, plan: StepPlan, counts: I32 | None, words: I32) -> Mapping[str, Any]:
        """Return the reports of the jobs that have ended."""
        wait = plan.copies is not None and plan.copies.wait
        copied = self.mover.finished(wait=wait)
        if self.states is not None:
            copied += self.states.finished(wait=wait and not copied)
        return {"copied": copied}

    def _begin(self, jobs: Sequence[CopyJob]) -> None:
        if self.states is None:
            self.mover.begin(jobs)
            return
        self.mover.begin(job for job in jobs if not job.states)
        self.states.begin(job for job in jobs if job.states)
