"""The interface of step features: work of a step beside sampling (scoring of prompts, pooling)."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from quire.contracts.step import StepPlan

Found = dict[str, dict[int, Any]]  # field of `StepResult` -> slot -> value
Results = Callable[[], Found]  # returns the results of a step; called after the device has finished the step


class StepFeature(Protocol):
    """A feature of steps. The runner calls it at fixed places. It launches nothing in a step in which no slot asks."""

    def apply(self, plan: StepPlan) -> None:
        """Update the slots: drop released requests, take admitted ones. Called before `run`."""

    def run(self, plan: StepPlan, hidden: Tensor) -> Results | None:
        """Launch the feature's work for a step; None if no slot asks for it. Does not wait for the device.

        hidden   [>= T, hidden] output of the layers; the next step overwrites it
        """
