"""The interface of step features: work of a step beside sampling (scoring of prompts, pooling)."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from quire.contracts.step import StepPlan

Found = dict[str, dict[int, Any]]  # field of `StepResult` -> slot -> value
Results = Callable[[], Found]  # returns the results of a step; called after the device has finished the step


class StepFeature(Protocol):
    """Work of a step beside sampling: pooling, log-probabilities of prompts. The runner calls it in every step.

    A feature launches nothing in a step in which no request asks for it.
    """

    def apply(self, plan: StepPlan) -> None:
        """Forget the requests that the plan releases; remember the newly admitted requests that ask for the feature.

        The runner calls it before `run`.
        """

    def run(self, plan: StepPlan, hidden: Tensor) -> Results | None:
        """Launch the feature's work for a step, without waiting. Return a function that gives the results, or None.

        The runner calls the returned function after the device has finished the step. None: the step gives no result.

        hidden   [>= T, hidden] output of the layers, before the final norm; the next step overwrites it
        """
