"""A step feature that shows the logits of each step to a test."""

from collections.abc import Callable

from torch import Tensor

from quire.worker.features import StepFeature

ReadLogits = Callable[[Tensor, Tensor, Tensor], None]  # slots [R], positions [R] and logits [R, V] of a step


class LogitsTap(StepFeature):
    """Shows the logits of the sampled rows, once per step that samples."""

    def __init__(self, tap: ReadLogits) -> None:
        self._tap = tap

    def logits(self, slots: Tensor, positions: Tensor, logits: Tensor) -> None:
        self._tap(slots, positions, logits)
