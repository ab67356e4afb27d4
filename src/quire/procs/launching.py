"""The executor of a device that runs by itself: submitting launches a step, collecting waits for the oldest."""

from collections.abc import Callable
from typing import Protocol

from quire.contracts.errors import EngineDead
from quire.contracts.protocols import ExecutorFacts
from quire.contracts.step import I32, StepPlan, StepResult


class Launches(Protocol):
    """A worker whose steps run on after they were launched."""

    def submit(self, plan: StepPlan) -> None:
        """Launch a step, but for the sampling when it needs masks."""

    def release(self, late: I32) -> None:
        """Launch the sampling of the last step, with its masks; see `Executor.release`."""

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
        self._attempt(lambda worker: worker.submit(plan))

    def release(self, step: int, late: I32) -> None:
        """Hand on the masks of the step that was submitted last, if it waits for any."""
        if len(late):
            self._attempt(lambda worker: worker.release(late))

    def _attempt(self, launch: Callable[[Launches], None]) -> None:
        if self._fault is None:
            try:
                assert self._worker is not None, "submitted after shutdown"
                launch(self._worker)
            except Exception as fault:  # whatever the device raises stops the engine, with its cause, at collect
                self._fault = fault

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
