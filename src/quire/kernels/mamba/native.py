"""Mamba 2 in C, row by row, for decodes and prompts; native.c has the code."""

import ctypes

import torch
from torch import Tensor

from quire.kernels.mamba import MambaForm, MambaWeights
from quire.kernels.native.library import loaded
from quire.kernels.native.states import state_rows
from quire.kernels.states import MATRICES, StateMeta, StateView

ORDERS = ("", "gated", "first")  # in the order of their numbers in the C code


def mix(
    inner: Tensor,
    gate: Tensor,
    step: Tensor,
    weights: MambaWeights,
    state: StateView,
    meta: StateMeta,
    form: MambaForm,
) -> Tensor:
    """Return y [T, H * P], and update the states. See `quire.kernels.mamba`."""
    assert state.matrix is not None, "the layer keeps matrices"
    matrix = state.matrix
    _check((inner, gate, step), weights, state, form)
    y = inner.new_empty(len(inner), form.width)
    rows, threads = state_rows("mamba", inner, form.channels + form.heads, state, meta), torch.get_num_threads()
    u = inner.new_empty((rows.scratch_rows, form.channels), dtype=torch.float32)
    o = inner.new_empty((len(inner), form.width), dtype=torch.float32)
    copies = matrix.new_empty((threads if rows.pending else 0, form.head_dim * form.state_dim))
    own = (weights.conv, weights.bias, weights.rate, weights.shift, weights.skip, weights.norm)
    loaded().quire_mamba(
        ctypes.byref(rows),
        *(one.data_ptr() for one in (inner, gate, step)),
        *(0 if one is None else one.data_ptr() for one in own),
        *(one.data_ptr() for one in (state.columns, matrix, u, o, copies, y)),
        form.heads,
        form.groups,
        form.head_dim,
        form.state_dim,
        *(one.stride(0) for one in (inner, gate, step, state.columns, matrix)),
        form.eps,
        form.lowest,
        form.highest,
        len(weights.conv),
        ORDERS.index(form.norm),
        inner.dtype == torch.bfloat16,
        matrix.dtype == torch.bfloat16,
        threads,
    )
    return y


def _check(rows: tuple[Tensor, ...], weights: MambaWeights, state: StateView, form: MambaForm) -> None:
    """Check types, shapes and strides, which the C code does not check; raise ValueError."""
    dtype, (_, taps, channels), matrix = rows[0].dtype, state.columns.shape, state.matrix
    assert matrix is not None
    widths = form.channels, form.width, form.heads
    if dtype not in (torch.float32, torch.bfloat16) or any(
        one.dtype != dtype or one.shape != (len(rows[0]), width) or (one.stride(1) != 1 and width > 1)
        for one, width in zip(rows, widths, strict=True)
    ):
        raise ValueError(
            f"native mamba: inner, gate and step must be of one type, float32 or bfloat16, contiguous inside a row, "
            f"and of widths {widths}; they are {[(one.dtype, tuple(one.shape), one.stride()) for one in rows]}"
        )
    shape = form.heads, form.state_dim, form.head_dim
    packed = shape[1] * shape[2], shape[2], 1
    if matrix.dtype not in MATRICES or matrix.shape[1:] != shape or matrix.stride()[1:] != packed:
        raise ValueError(
            f"native mamba: matrices must be float32 or bfloat16 {shape}, contiguous in a state; they are "
            f"{matrix.dtype} {tuple(matrix.shape)} with strides {matrix.stride()}"
        )
    if state.columns.dtype != dtype or channels != form.channels or state.columns.stride()[1:] != (channels, 1):
        raise ValueError(
            f"native mamba: columns must be {dtype} [., {taps}, {form.channels}], contiguous in a state; they are "
            f"{state.columns.dtype} {tuple(state.columns.shape)} with strides {state.columns.stride()}"
        )
    own = {"conv": (taps + 1, channels), "bias": (channels,), "norm": (form.width,)}
    own |= dict.fromkeys(("rate", "shift", "skip"), (form.heads,))
    optional = {"bias"} if form.norm else {"bias", "norm"}
    for name, size in own.items():
        one = getattr(weights, name)
        if one is None and name in optional:
            continue
        if one is None or one.dtype != torch.float32 or one.shape != size or not one.is_contiguous():
            found = None if one is None else (one.dtype, tuple(one.shape))
            raise ValueError(f"native mamba: {name} must be float32 {size}; it is {found}")
    if form.heads % form.groups or form.norm not in ORDERS:
        raise ValueError(f"native mamba: groups divide the heads, and the norm is one of {ORDERS}: {form}")
