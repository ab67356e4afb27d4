"""Replicas on CPUs whose decode steps have one size, as those of GPUs in CUDA graphs.

In engines of this process by `exchange_evenly`; in processes of ranks by the control "attach", which calls `make`.
"""

from dataclasses import replace
from typing import Any

import pytest

from quire.contracts.parallel import Rank
from quire.contracts.step import StepPlan
from quire.kernels.step.state import Limits
from quire.layers.stack import Model
from quire.plan.graphs import even_bounds
from quire.spec.joint_passes import JointPasses
from quire.worker import construct
from quire.worker.agreement import ReplicaAgreement
from quire.worker.features import StepFeature
from quire.worker.runner import StepRunner

from .features import feature

SIZES = (2, 4)  # decodes; steps with more of them exchange exact numbers


def even(limits: Limits, passes: JointPasses | None) -> Limits:
    """Return the limits as those of a GPU that captures decode steps of one size on all replicas."""
    lengths = (limits.num_drafts,) if limits.num_drafts else ()
    limits = replace(limits, graph_sizes=SIZES, draft_lengths=lengths)
    bounds = even_bounds(SIZES, limits.queries)
    return replace(limits, exchanges=replace(limits.exchanges, bounds=bounds, even=True, joint=passes is not None))


def exchange_evenly(patch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let replicas exchange fixed numbers of rows in decode steps. Returns the (bound, rows of each replica) of each
    step of a rank, which come as the steps do; bound 0: exact numbers."""
    seen = list[tuple[int, ...]]()

    class Even(ReplicaAgreement):
        def __init__(
            self, model: Model, words: Any, limits: Limits, passes: JointPasses | None = None, **more: Any
        ) -> None:
            super().__init__(model, words, even(limits, passes), passes, **more)

        def before(self, plan: StepPlan) -> None:
            super().before(plan)
            seen.append((self._tokens.bound, *self._tokens.rows))

    patch.setattr(construct, "ReplicaAgreement", Even)
    return seen


class SeenBounds(StepFeature):
    """Keeps the bounds of the steps of a rank. The control "bounds" returns them."""

    def __init__(self, agreement: ReplicaAgreement) -> None:
        self._agreement, self._seen = agreement, list[int]()
        self.controls = {"bounds": lambda: self._seen}

    def before(self, plan: StepPlan) -> None:
        self._seen.append(self._agreement._tokens.bound)


def make(runner: StepRunner, rank: Rank) -> StepFeature:
    """Let the replica of a rank exchange fixed numbers of rows; see `quire.assemble.rank_child`."""
    own = feature(runner, ReplicaAgreement)
    own.__init__(own._model, own._words, even(own._limits, own._passes), own._passes, late=own._late)  # type: ignore[misc]
    return SeenBounds(own)
