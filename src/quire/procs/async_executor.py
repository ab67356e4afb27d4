"""The executor of an asynchronous device: `submit` launches a step, `collect` waits for the oldest step."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from quire.contracts.errors import ConfigError, EngineDead
from quire.contracts.protocols import Executor, ExecutorFacts
from quire.contracts.step import I32, StepPlan, StepResult

Controls = Mapping[str, Callable[..., object]]


class Launches(Protocol):
    """A worker that launches steps asynchronously: they run on the device after `submit` has returned."""

    def submit(self, plan: StepPlan) -> None:
        """Launch a step. If it needs grammar masks, launch everything but the sampling."""

    def release(self, masks: I32) -> None:
        """Launch the sampling of the last step with its grammar masks; see `Executor.release`."""

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its result. Called once for each step, after `release`."""


class LaunchingExecutor(Executor):
    """Executor that launches steps in the caller's thread; the device runs them later. After a fault every step fails.

    controls   functions that `control` calls, by name
    """

    def __init__(self, worker: Launches, facts: ExecutorFacts, controls: Controls | None = None) -> None:
        self._worker: Launches | None = worker
        self._facts, self._controls = facts, controls or {}
        self._fault: Exception | None = None

    def submit(self, plan: StepPlan) -> None:
        """Launch a step. An error is not raised here, but by the next `collect`."""
        self._attempt(lambda worker: worker.submit(plan))

    def release(self, step: int, masks: I32) -> None:
        """Give the grammar masks to the step that was submitted last, if it waits for masks."""
        if len(masks):
            self._attempt(lambda worker: worker.release(masks))

    def _attempt(self, launch: Callable[[Launches], None]) -> None:
        if self._fault is None:
            try:
                assert self._worker is not None, "submitted after shutdown"
                launch(self._worker)
            except Exception as fault:  # any error of the device stops the engine, with its cause, at `collect`
                self._fault = fault

    def collect(self) -> StepResult:
        """Return the oldest step's result. Raises `EngineDead` with the cause when the step failed as a whole."""
        if self._fault is None:
            try:
                assert self._worker is not None, "collected after shutdown"
                return self._worker.collect()
            except Exception as fault:
                self._fault = fault
        raise EngineDead(f"the step failed: {type(self._fault).__name__}: {self._fault}") from self._fault

    def control(self, name: str, args: dict[str, Any]) -> object:
        """Call the function `name` of `controls` with `args`, and return its value."""
        if name not in self._controls:
            raise ConfigError(f"unknown control {name!r}.")
        return self._controls[name](**args)

    def facts(self) -> ExecutorFacts:
        return self._facts

    def shutdown(self, *, wait: bool = True) -> None:
        """Drop the worker, so that its device memory is freed; idempotent."""
        self._worker, self._controls = None, {}
