"""Differences between the results of Quire's steps and those of a reference."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.explain.verify.recording import Recording


@dataclass
class Differences:
    """Differences between Quire and transformers: `found[stage, step]` is a `relative_difference`.

    ours   Quire's results, by stage (a half of a layer, for example) and step (an operation in the stage)
    A step that transformers never reached has no entry.
    """

    ours: Recording
    found: dict[tuple[str, str], float] = field(default_factory=dict)

    def replace(self, stage: str, step: str, theirs: Tensor) -> Tensor:
        """Return Quire's result of a step in the shape of `theirs`, the reference's result.

        The difference between the two goes to `found`.
        """
        ours = self.ours.result(stage, step)
        self.found[stage, step] = relative_difference(ours.flatten(1), theirs.reshape(len(ours), -1))
        return ours.reshape(theirs.shape)

    def num_rows(self, stage: str, step: str) -> int:
        """Return the tokens for which Quire recorded a step."""
        return len(self.ours.result(stage, step))

    def has(self, stage: str, step: str) -> bool:
        """True for a step that Quire recorded."""
        return step in self.ours.pieces.get(stage, {})


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference between `ours` and `theirs` [T, width], relative to the row of `theirs`.

    The difference is divided by the largest value of the row, but at least by a tenth of the median row's largest:
    sums near zero have rounding, too. Different shapes differ by infinity.
    """
    if ours.shape != theirs.shape:
        return float("inf")
    apart = (ours.double() - theirs.double()).abs().amax(-1)
    size = theirs.double().abs().amax(-1)
    size = size.clamp_min(max(float(size.median()) / 10, torch.finfo(torch.float32).tiny))
    return float((apart / size).max())
