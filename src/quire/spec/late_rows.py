"""Rows of decodes that a drafter with layers has not seen: small steps without drafts leave them to a catch-up pass.

    step   drafts   rows that are kept of a slot afterwards, at most
    1      2        3     its own: the host does not know how many of them were accepted
    2      0        1     overdue: drafts came before. The catch-up leaves none, then the step keeps its row
    3      0        2
    4      2        3     its first pass takes both rows

All ranks count alike: the counts depend on plans alone, not on results, which come to each rank at a time of its own.
"""

from typing import Any

import numpy as np

from quire.contracts.step import I32

Bools = np.ndarray[Any, np.dtype[np.bool_]]


class LateRows:
    """Counts the rows that are kept of each slot, and tells when a drafter must catch up.

    most    most decodes of a step that leaves its rows to a later pass
    width   most rows of a decode in the first pass of a step
    room    most rows of a decode that are kept
    """

    def __init__(self, num_slots: int, most: int, width: int, room: int) -> None:
        self.most, self.width, self.room = most, width, room
        self._rows = np.ones(num_slots, np.int64)
        self._drafted = np.zeros(num_slots, bool)  # True: drafts were accepted, perhaps, over the end of a block

    def step(self, decodes: I32, tokens: I32, prompts: I32, *, late: bool, completes: bool) -> Bools:
        """Count the rows of a step. Return, for each decode, True if the drafter must catch up before the step.

        decodes, tokens   [D] slots that decode, and their tokens
        prompts           [P] the other slots
        late              True: the step leaves its rows to a later pass
        completes         see `PlanFeatures`
        """
        rows = self._rows[decodes]
        due = self._drafted[decodes] | (rows >= self.room) | completes if late else rows > self.width
        self._rows[decodes] = np.where(due, 0, rows) + 1 if late else tokens
        self._drafted[decodes] = tokens > 1
        self._rows[prompts], self._drafted[prompts] = 1, False
        return due
