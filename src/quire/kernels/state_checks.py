"""Checks of states before kernels for GPUs read them."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.states import MATRICES, StateView, packed


def check_states(
    kind: str, rows: Tensor, state: StateView, columns: tuple[int, int], matrix: tuple[int, ...], pending: int
) -> None:
    """Raise ValueError for states that kernels would read wrongly.

    kind      of the layer, for the message;  rows  inputs of the convolution, of the dtype of columns
    columns   K - 1 and channels;  matrix  heads, key dim, value dim; (): the layer keeps columns alone
    pending   numbers of a pending row
    """
    if matrix:
        own = state.matrix
        assert own is not None, "the layer keeps matrices"
        if own.dtype not in MATRICES or own.shape[1:] != matrix or not packed(own):
            raise ValueError(
                f"triton {kind}: matrices must be float32 or bfloat16 {matrix}, contiguous in a state; they are "
                f"{own.dtype} {tuple(own.shape)} with strides {own.stride()}"
            )
    kept = state.columns
    if kept.dtype != rows.dtype or kept.shape[1:] != columns or not packed(kept):
        raise ValueError(
            f"triton {kind}: columns must be {rows.dtype} {columns}, contiguous in a state; they are {kept.dtype} "
            f"{tuple(kept.shape)} with strides {kept.stride()}"
        )
    later, at = state.pending, state.at
    if later is None or at is None:
        return
    if later.dtype != rows.dtype or later.shape[2] != pending or not packed(later) or at.dtype != torch.int32:
        raise ValueError(
            f"triton {kind}: pending rows must be {rows.dtype} [., ., {pending}], contiguous in a state, and lengths "
            f"int32; they are {later.dtype} {tuple(later.shape)} with strides {later.stride()}, and {at.dtype}"
        )
