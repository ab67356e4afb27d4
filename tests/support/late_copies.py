"""Engines of a CPU whose weights "in host memory" come to memory of their own, by copies that a careless engine sees.

A copy destroys what is in its place at once, and brings the new numbers only when somebody waits for it. So a layer
that runs too early, or whose slot was given away too early, computes with numbers that are none.
"""

from collections.abc import Callable, Sequence

import pytest

from quire.kernels.layer_copies import LayerCopies, Piece
from quire.plan.meeting_rows.rows import ROWS

NAN = 0xFF  # bytes of which every number of floating point is none


class LateCopies(LayerCopies):
    """Copies as late as a device may make them. copied: their number"""

    def __init__(self) -> None:
        self.copied = 0

    def follow(self) -> None:
        """Do nothing: earlier work has ended."""

    def copy(self, pieces: Sequence[Piece]) -> Callable[[], None]:
        for _, target in pieces:
            target.fill_(NAN)

        def wait() -> None:
            self.copied += 1
            for source, target in pieces:
                target.copy_(source)

        return wait


def apart(patch: pytest.MonkeyPatch, slots: int) -> list[LateCopies]:
    """Let engines of a CPU have weights in host memory, and so many slots. Return the list of the copies they make.

    With one slot it does not matter whether memory is saved: a stage may have a single layer.
    """
    made: list[LateCopies] = []

    def copies(device: object) -> LateCopies:
        made.append(LateCopies())
        return made[-1]

    patch.setattr("quire.assemble.build.layer_copies", copies)
    patch.setattr("quire.assemble.build.SLOTS", slots)
    patch.setattr("quire.plan.host_layers.SLOTS", slots if slots > 1 else 0)
    rows = [row for row in ROWS if (row.feature, row.other) != ("weights in host memory", "a CPU")]
    patch.setattr("quire.plan.meetings.ROWS", tuple(rows))
    return made
