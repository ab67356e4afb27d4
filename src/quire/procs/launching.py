"""The executor of a device that runs by itself: submitting launches a step, collecting waits for the oldest."""

from typing import Protocol

from quire.contracts.errors import EngineDead
from quire.contracts.protocols import ExecutorFacts
from quire.contracts.step import StepPlan, StepResult


class Launches(Protocol):
    """A worker whose steps run on after they were launched."""

    def submit(self, plan: StepPlan) -> None:
        """Launch a step."""

    def collect(self) -> StepResult:
        """Wait for the oldest step that was launched."""


class LaunchingExecutor:
    """Runs plans in this thread, as far as the host takes part in them. After a fault every step fails."""

    def __init__(self, worker: Launches, facts: ExecutorFacts) -> None:
        self._worker: Launches | None = worker
        self._facts = facts
        self._fault: Exception | None = None

    def submit(self, plan: StepPlan) -> None:
        """Launch one step. A fault is kept for `collect`."""
        if self._fault is None:
            try:
                assert self._worker is not None, "submitted after shutdown"
                self._worker.submit(plan)
            except Exception as fault:  # whatever the device raises stops the engine, with its cause, at collect
                self._fault = fault

    def release(self, step: int, late: dict[int, bytes]) -> None:
        """Nothing waits for masks yet."""
        assert not late, "this executor takes no grammar masks"

    def collect(self) -> StepResult:
        """The oldest step's result; raises `EngineDead` with the cause when the step failed as a whole."""
        if self._fault is None:
            try:
                assert self._worker is not None, "collected after shutdown"
                return self._worker.collect()
            except Exception as fault:
                self._fault = fault
        raise EngineDead(f"the step failed: {type(self._fault).__name__}: {self._fault}") from self._fault

    def facts(self) -> ExecutorFacts:
        """Sizes and resolved plans."""
        return self._facts

    def shutdown(self) -> None:
        """Let go of the worker and of what it holds on the device; idempotent."""
        self._worker = None
