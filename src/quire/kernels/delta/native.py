"""The gated delta rule, row by row, for decodes and prompts; native.c has the C code."""

import ctypes

import torch
from torch import Tensor

from quire.kernels.delta import DeltaForm, DeltaWeights
from quire.kernels.native.library import loaded
from quire.kernels.native.states import state_rows
from quire.kernels.states import MATRICES, StateMeta, StateView

MOST_DIM = 512  # of a key or a value


def mix(
    qkv: Tensor,
    gate: Tensor,
    decay: Tensor,
    strength: Tensor,
    weights: DeltaWeights,
    state: StateView,
    meta: StateMeta,
    form: DeltaForm,
) -> Tensor:
    """Return y [T, H * Dv], and update the states. See `quire.kernels.delta`."""
    assert state.matrix is not None, "the layer keeps matrices"
    matrix, by_channel = state.matrix, len(weights.shift) != form.heads
    _check((qkv, gate, decay, strength), weights, state, form)
    y = qkv.new_empty(len(qkv), form.heads * form.value_dim)
    own = state_rows("delta", qkv, form.channels + weights.shift.numel() + form.heads, state, meta)
    threads = torch.get_num_threads()
    u = qkv.new_empty((own.scratch_rows, form.channels), dtype=torch.float32)
    copies = matrix.new_empty((threads if own.pending else 0, form.key_dim * form.value_dim))
    loaded().quire_delta(
        ctypes.byref(own),
        *(one.data_ptr() for one in (qkv, gate, decay, strength)),
        *(one.data_ptr() for one in (weights.conv, weights.rate, weights.shift, weights.norm)),
        *(one.data_ptr() for one in (state.columns, matrix, u, copies, y)),
        form.key_heads,
        form.heads,
        form.key_dim,
        form.value_dim,
        len(weights.conv),
        *(one.stride(0) for one in (qkv, gate, decay, strength, state.columns, matrix)),
        form.eps,
        form.lowest,
        by_channel,
        form.act == "sigmoid",
        form.doubled,
        qkv.dtype == torch.bfloat16,
        matrix.dtype == torch.bfloat16,
        threads,
    )
    return y


def _check(rows: tuple[Tensor, ...], weights: DeltaWeights, state: StateView, form: DeltaForm) -> None:
    """Check types, shapes and strides, which the C code does not check; raise ValueError."""
    dtype, (_, taps, channels), wide = rows[0].dtype, state.columns.shape, form.heads * form.value_dim
    shifts = weights.shift.numel()
    widths = form.channels, wide, shifts, form.heads
    if dtype not in (torch.float32, torch.bfloat16) or any(
        one.dtype != dtype or one.shape != (len(rows[0]), width) or (one.stride(1) != 1 and width > 1)
        for one, width in zip(rows, widths, strict=True)
    ):
        raise ValueError(
            f"native delta: qkv, gate, decay and strength must be of one type, float32 or bfloat16, contiguous inside "
            f"a row, and of widths {widths}; they are {[(one.dtype, tuple(one.shape), one.stride()) for one in rows]}"
        )
    matrix = state.matrix
    assert matrix is not None
    shape = form.heads, form.key_dim, form.value_dim
    packed = shape[1] * shape[2], shape[2], 1
    if matrix.dtype not in MATRICES or matrix.shape[1:] != shape or matrix.stride()[1:] != packed:
        raise ValueError(
            f"native delta: matrices must be float32 or bfloat16 {shape}, contiguous in a state; they are "
            f"{matrix.dtype} {tuple(matrix.shape)} with strides {matrix.stride()}"
        )
    if state.columns.dtype != dtype or channels != form.channels or state.columns.stride()[1:] != (channels, 1):
        raise ValueError(
            f"native delta: columns must be {dtype} [., {taps}, {form.channels}], contiguous in a state; they are "
            f"{state.columns.dtype} {tuple(state.columns.shape)} with strides {state.columns.stride()}"
        )
    own = {"conv": (taps + 1, channels), "rate": (form.heads,), "shift": (shifts,), "norm": (form.value_dim,)}
    for name, size in own.items():
        one = getattr(weights, name)
        if one.dtype != torch.float32 or one.shape != size or not one.is_contiguous():
            raise ValueError(f"native delta: {name} must be float32 {size}; it is {one.dtype} {tuple(one.shape)}")
    if max(form.key_dim, form.value_dim) > MOST_DIM or shifts not in (form.heads, form.heads * form.key_dim):
        raise ValueError(
            f"native delta: heads have at most {MOST_DIM} numbers, and a shift for each head or each number of a key; "
            f"the form is {form}, and there are {shifts} shifts"
        )
