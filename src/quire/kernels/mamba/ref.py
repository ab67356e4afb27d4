"""Mamba 2 as its formulas read, row by row in float32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.mamba import MambaForm, MambaWeights
from quire.kernels.states import StateMeta, StateView, convolved, courses


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
    y = torch.zeros(len(inner), form.width, device=inner.device)
    for one in courses(torch.cat((inner, step), 1), state, meta):
        x, b, c = _parts(F.silu(convolved(one.inputs, weights.conv, weights.bias)), form)
        steps = F.softplus(one.rows[:, form.channels :].float() + weights.shift).clamp(form.lowest, form.highest)
        factors = torch.exp(-weights.rate.exp() * steps)
        for i, row, matrix in one.through(state.matrix):
            matrix *= factors[i, :, None, None]
            matrix += b[i, :, :, None] * (steps[i, :, None] * x[i])[:, None]
            if row >= 0:
                y[row] = (torch.einsum("hnp,hn->hp", matrix, c[i]) + weights.skip[:, None] * x[i]).flatten()
    return finished(y, gate, weights.norm, form).to(inner.dtype)


def finished(y: Tensor, gate: Tensor, norm: Tensor | None, form: MambaForm) -> Tensor:
    """Return the outputs [T, H * P] of the heads, in float32, behind their gates and their norm."""
    opened = F.silu(gate.float())
    if form.norm != "first":
        y = y * opened
    if form.norm:
        assert norm is not None, "the form has a norm"
        groups = y.unflatten(1, (form.groups, -1))
        y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + form.eps)).flatten(1) * norm
    return y * opened if form.norm == "first" else y


def _parts(u: Tensor, form: MambaForm) -> tuple[Tensor, Tensor, Tensor]:
    """Return values [n, H, P], inputs and outputs [n, H, N] of each head, of u [n, C]."""
    width = form.groups * form.state_dim
    x, b, c = u.split((form.width, width, width), 1)
    b, c = (
        one.unflatten(1, (form.groups, form.state_dim)).repeat_interleave(form.heads // form.groups, 1)
        for one in (b, c)
    )
    return x.unflatten(1, (form.heads, form.head_dim)), b, c
