"""Mamba 2 on a GPU: decodes of one row by `triton_decode.py`, prompts by `triton_prompts.py`.

Sequences of several rows are prompts, also those of drafts.
"""

from __future__ import annotations

from torch import Tensor

from quire.kernels.mamba import MambaForm, MambaWeights
from quire.kernels.mamba.triton_call import MambaCall
from quire.kernels.mamba.triton_decode import mix_decodes
from quire.kernels.mamba.triton_prompts import mix_prompts
from quire.kernels.states import MATRICES, StateMeta, StateView, packed


def mix(
    inner: Tensor,
    gate: Tensor,
    step: Tensor,
    weights: MambaWeights,
    state: StateView,
    meta: StateMeta,
    form: MambaForm,
) -> Tensor:
    """Return y [T, H * P], and update the states. See `quire.kernels.mamba`. Rows of no sequence are not written."""
    rows = tuple(one if one.stride(-1) == 1 or one.shape[-1] == 1 else one.contiguous() for one in (inner, gate, step))
    _check(inner, weights, state, form)
    call = MambaCall(*rows, weights, state, meta, form, inner.new_empty(len(inner), form.width))
    if len(inner):
        if meta.decode_rows:
            mix_decodes(call)
        if meta.max_rows > min(1, meta.decode_rows):
            mix_prompts(call)
    return call.y


def _check(inner: Tensor, weights: MambaWeights, state: StateView, form: MambaForm) -> None:
    """Raise ValueError for states and weights that the kernels would read wrongly."""
    matrix, columns = state.matrix, state.columns
    assert matrix is not None, "the layer keeps matrices"
    shape = form.heads, form.state_dim, form.head_dim
    if matrix.dtype not in MATRICES or matrix.shape[1:] != shape or not packed(matrix):
        raise ValueError(
            f"triton mamba: matrices must be float32 or bfloat16 {shape}, contiguous in a state; they are "
            f"{matrix.dtype} {tuple(matrix.shape)} with strides {matrix.stride()}"
        )
    own = len(weights.conv) - 1, form.channels
    if columns.dtype != inner.dtype or columns.shape[1:] != own or not packed(columns):
        raise ValueError(
            f"triton mamba: columns must be {inner.dtype} {own}, contiguous in a state; they are {columns.dtype} "
            f"{tuple(columns.shape)} with strides {columns.stride()}"
        )
    if form.norm and weights.norm is None:
        raise ValueError(f'triton mamba: norm "{form.norm}" needs weights.norm, float32 [{form.width}]')
