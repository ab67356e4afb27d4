"""Step features of a runner, as tests look at them and replace them."""

from typing import Any, TypeVar

from quire.kvstore.mover import BlockMover
from quire.worker.copies import TierCopies
from quire.worker.features import StepFeature
from quire.worker.runner import StepRunner
from quire.worker.step_drafts import StepDrafts

F = TypeVar("F", bound=StepFeature)


def find(runner: StepRunner, kind: type[F]) -> F | None:
    """Return the feature of this class; None when the runner has none."""
    return next((one for one in runner.features.all if isinstance(one, kind)), None)


def feature(runner: StepRunner, kind: type[F]) -> F:
    """Return the feature of a runner that has it."""
    found = find(runner, kind)
    assert found is not None, f"the runner has no {kind.__name__}"
    return found


def drafter_of(runner: StepRunner) -> Any:
    """Return the drafter of a runner that drafts."""
    return feature(runner, StepDrafts).drafter


def set_drafter(runner: StepRunner, drafter: Any) -> None:
    """Let a runner draft with `drafter`, and with no other."""
    if (old := find(runner, StepDrafts)) is not None:
        runner.features.detach(old)
    runner.features.attach(StepDrafts(drafter))


def mover_of(runner: StepRunner) -> BlockMover:
    """Return the mover of a runner with tiers of KV blocks."""
    return feature(runner, TierCopies).mover
