"""Mamba 2 on a GPU: decodes of one row by `triton_decode.py`, prompts by `triton_prompts.py`.

Where drafts are verified, sequences of up to as many rows as a state has pending ones go by `triton_rows.py`.
"""

from __future__ import annotations

from torch import Tensor

from quire.kernels.mamba import MambaForm, MambaWeights
from quire.kernels.mamba.triton_call import MambaCall
from quire.kernels.mamba.triton_decode import mix_decodes
from quire.kernels.mamba.triton_prompts import mix_prompts
from quire.kernels.mamba.triton_rows import mix_rows
from quire.kernels.state_checks import check_states
from quire.kernels.states import StateMeta, StateView


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
    sizes = form.heads, form.state_dim, form.head_dim
    width = form.channels + form.heads
    check_states("mamba", inner, state, (len(weights.conv) - 1, form.channels), sizes, width)
    if form.norm and weights.norm is None:
        raise ValueError(f'triton mamba: norm "{form.norm}" needs weights.norm, float32 [{form.width}]')
    call = MambaCall(*rows, weights, state, meta, form, inner.new_empty(len(inner), form.width))
    if len(inner):
        limit = min(1, meta.decode_rows) if state.pending is None else state.pending.shape[1]
        if state.pending is not None:
            mix_rows(call)
        elif limit:
            mix_decodes(call)
        if meta.max_rows > limit:
            mix_prompts(call, limit)
    return call.y
