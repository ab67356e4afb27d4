"""States of recurrent layers in a step."""

from dataclasses import replace

import numpy as np
from torch import Tensor

from quire.contracts.step import I32, StepPlan
from quire.kernels.states import StateMeta
from quire.kernels.step import StepBuffers, StepWords
from quire.kernels.step.state import zeros
from quire.kernels.step.upload import Change
from quire.layers.context import StepContext
from quire.worker.features import StepFeature
from quire.worker.recorder import StepShape

COPIES = 2  # of a slot in a step


class RequestStates(StepFeature):
    """Tells layers where the states of the step's requests are, and which of them are copied to checkpoints.

    A request's states are in the row of its slot; behind the row of the dummy slot come the checkpoints, from number 1.

    rows   [num_rows, state bytes] all states of the device
    """

    def __init__(self, rows: Tensor, num_slots: int, step: StepWords, buffers: StepBuffers) -> None:
        self._rows, self._num_slots, self._step, self._buffers = rows, num_slots, step, buffers
        self._kept_at, self._kept = (
            zeros(num_slots + 1, COPIES, dtype=buffers.seq_lens.dtype, device=rows.device) for _ in range(2)
        )
        self._copied: I32 = np.empty(0, np.int32)  # slots of the copies of the last plan that had some

    def apply(self, plan: StepPlan) -> list[Change]:
        """Return the table changes for the copies to checkpoints. See `StepFeature`."""
        if plan.features.states is None and not len(self._copied):
            return []
        lengths = {int(slot): [0] * COPIES for slot in self._copied}
        targets = {int(slot): [0] * COPIES for slot in self._copied}
        self._copied = np.empty(0, np.int32)
        if plan.features.states is not None:
            self._copied = plan.features.states.kept[:, 0]
            for slot in self._copied.tolist():
                lengths[slot], targets[slot] = [0] * COPIES, [0] * COPIES
            for slot, length, checkpoint in plan.features.states.kept.tolist():
                place = lengths[slot].index(0)
                lengths[slot][place], targets[slot][place] = length, self._num_slots + checkpoint
        return [
            Change(table, COPIES * slot, np.array(values, np.int32))
            for table, by_slot in ((self._kept_at, lengths), (self._kept, targets))
            for slot, values in by_slot.items()
        ]

    def before(self, plan: StepPlan) -> None:
        """Copy checkpoints to the states of admitted requests. See `StepFeature`."""
        if plan.features.states is not None:
            for slot, checkpoint in plan.features.states.restored.tolist():
                self._rows[slot].copy_(self._rows[self._num_slots + checkpoint])

    def context(self, ctx: StepContext, shape: StepShape) -> StepContext:
        """Return the context with the metadata of states. See `StepFeature`."""
        attention = ctx.attention[0]
        assert attention.max_query_len is not None, "a step knows the most rows of a sequence"
        states = StateMeta(
            query_start=self._step.starts[: shape.seqs + 1],
            seq_lens=self._buffers.seq_lens[: shape.seqs],
            slots=self._step.slots[: shape.seqs],
            kept_at=self._kept_at,
            kept=self._kept,
            max_rows=attention.max_query_len,
            decode_rows=attention.decode_len,
        )
        return replace(ctx, states=states)
