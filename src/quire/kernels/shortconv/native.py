"""The short convolution in C, for decodes and prompts; native.c has the code."""

import ctypes

import torch
from torch import Tensor

from quire.kernels.native.library import loaded
from quire.kernels.native.states import state_rows
from quire.kernels.shortconv import ShortConvWeights
from quire.kernels.states import StateMeta, StateView


def mix(rows: Tensor, weights: ShortConvWeights, state: StateView, meta: StateMeta) -> Tensor:
    """Return y [T, C], and update the states. See `quire.kernels.shortconv`."""
    taps, channels = weights.conv.shape
    _check(rows, weights, state)
    own = state_rows("shortconv", rows, channels, state, meta)
    y = rows.new_empty(len(rows), channels)
    loaded().quire_shortconv(
        ctypes.byref(own),
        rows.data_ptr(),
        weights.conv.data_ptr(),
        0 if weights.bias is None else weights.bias.data_ptr(),
        state.columns.data_ptr(),
        y.data_ptr(),
        channels,
        taps,
        rows.stride(0),
        state.columns.stride(0),
        rows.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return y


def _check(rows: Tensor, weights: ShortConvWeights, state: StateView) -> None:
    """Check types, shapes and strides, which the C code does not check; raise ValueError."""
    taps, channels = weights.conv.shape
    if rows.dtype not in (torch.float32, torch.bfloat16) or rows.shape[1] != 3 * channels or rows.stride(1) != 1:
        raise ValueError(
            f"native shortconv: rows must be float32 or bfloat16 [., {3 * channels}], contiguous inside a row; they "
            f"are {rows.dtype} {tuple(rows.shape)} with strides {rows.stride()}"
        )
    columns, size = state.columns, (taps - 1, channels)
    if columns.dtype != rows.dtype or columns.shape[1:] != size or columns.stride()[1:] != (channels, 1):
        raise ValueError(
            f"native shortconv: columns must be {rows.dtype} {size}, contiguous in a state; they are {columns.dtype} "
            f"{tuple(columns.shape)} with strides {columns.stride()}"
        )
    for one, shape in ((weights.conv, (taps, channels)), (weights.bias, (channels,))):
        if one is not None and (one.dtype != torch.float32 or one.shape != shape or not one.is_contiguous()):
            raise ValueError(
                f"native shortconv: weights must be float32 {shape}; one is {one.dtype} {tuple(one.shape)}"
            )
