"""The sequences of a step and their states, as C code reads them (states.h)."""

import ctypes

import torch
from torch import Tensor

from quire.kernels.states import StateMeta, StateView

POINTERS = ("starts", "lengths", "slots", "kept_at", "kept", "pending", "at")
NUMBERS = ("sequences", "rows", "most_pending", "pending_width", "pending_stride", "at_stride")


class StateRows(ctypes.Structure):
    """Sequences of a step, their states and pending rows; the fields are those of the C structure.

    scratch_rows   rows of scratch with the step's rows and all that may be replayed
    """

    _fields_ = [(name, ctypes.c_void_p) for name in POINTERS] + [(name, ctypes.c_long) for name in NUMBERS]

    @property
    def scratch_rows(self) -> int:
        """Return the number of rows of the scratch of a convolution."""
        return int(self.rows + self.sequences * self.most_pending)


def state_rows(operation: str, rows: Tensor, width: int, state: StateView, meta: StateMeta) -> StateRows:
    """Return the sequences of a step with these rows [T, ...]; it points to the tensors of `state` and `meta`.

    operation, width   name, for errors; numbers of a pending row
    Raises ValueError for pending rows, or lengths, that the C code cannot read.
    """
    found = StateRows(
        *(one.data_ptr() for one in (meta.query_start, meta.seq_lens, meta.slots, meta.kept_at, meta.kept)),
        sequences=len(meta.slots),
        rows=len(rows),
    )
    pending, at = state.pending, state.at
    if pending is None and at is None:
        return found
    if pending is None or at is None:
        raise ValueError(f"native {operation}: pending rows have a length from which they count; one of both is None")
    if pending.dtype != rows.dtype or pending.shape[2] != width or pending.stride()[1:] != (width, 1):
        raise ValueError(
            f"native {operation}: pending rows must be {rows.dtype} [., ., {width}], contiguous in a state; they are "
            f"{pending.dtype} {tuple(pending.shape)} with strides {pending.stride()}"
        )
    if at.dtype != torch.int32 or at.shape[1:] != (1,):
        raise ValueError(f"native {operation}: lengths must be int32 [., 1]; they are {at.dtype} {tuple(at.shape)}")
    found.pending, found.at = pending.data_ptr(), at.data_ptr()
    found.most_pending, found.pending_width = pending.shape[1], width
    found.pending_stride, found.at_stride = pending.stride(0), at.stride(0)
    return found
