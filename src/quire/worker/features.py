"""What a step may do beside sampling: each is an object that the runner calls at fixed places and knows nothing of."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from quire.contracts.step import StepPlan

Found = dict[str, dict[int, Any]]  # fields of `StepResult`: slot -> what came of it
Results = Callable[[], Found]  # of a step that ran; to be called once the device has come past it


class StepFeature(Protocol):
    """A feature of steps. One that no slot of a step asks for launches nothing in it."""

    def apply(self, plan: StepPlan) -> None:
        """Requests leave their slots, and others take them; before `run`."""

    def run(self, plan: StepPlan, hidden: Tensor) -> Results | None:
        """Launch the work of a step, from the hidden states [>= T, hidden] that its layers leave and the next step's
        write over; None when nobody asked. Does not wait for the device."""
