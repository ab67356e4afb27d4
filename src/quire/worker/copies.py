"""The copies of KV blocks between tiers, as a step feature: jobs that a plan names begin before or after its step."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from quire.contracts.step import I32, CopyJob, FileNews, StepPlan
from quire.kernels.step import StepBuffers
from quire.kernels.step.upload import Change
from quire.kvstore.mover import BlockMover
from quire.worker.features import StepFeature


class TierCopies(StepFeature):
    """Begins the copy jobs of plans, and reports those that have ended. No step waits for a job.

    mover    runs the jobs of this rank for KV blocks
    states   runs those for checkpoints of states, or None
    rank     number of this rank in the engine
    """

    def __init__(self, mover: BlockMover, states: BlockMover | None = None, rank: int = 0) -> None:
        self.mover, self.states, self._rank = mover, states, rank
        self.parts: tuple[BlockMover, ...] = (mover,) if states is None else (mover, states)

    def apply(self, plan: StepPlan) -> list[Change]:
        """Begin the jobs that come before the step: all earlier steps are launched."""
        if plan.copies is not None:
            for dropped in plan.copies.dropped:
                self.parts[dropped.states].drop(dropped)
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
        return {"copied": copied, "files": self.news()}

    def news(self, *, first: bool = False) -> tuple[FileNews, ...]:
        """Return the changes of this rank's files since the last call, if the rank tells the core of them.

        first   also where there is none, so that the core knows which ranks tell it of their files
        """
        each = ((part.take_news(), part is self.states) for part in self.parts)
        return tuple(
            FileNews(rank=self._rank, came=news[0], went=news[1], states=states)
            for news, states in each
            if news is not None and (first or any(news))
        )

    def close(self) -> None:
        """Wait until files are deleted, some seconds at most."""
        for part in self.parts:
            part.close()

    def _begin(self, jobs: Sequence[CopyJob]) -> None:
        if self.states is None:
            self.mover.begin(jobs)
            return
        self.mover.begin(job for job in jobs if not job.states)
        self.states.begin(job for job in jobs if job.states)
