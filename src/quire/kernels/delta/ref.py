"""The gated delta rule as its formulas read, row by row in float32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.delta import FLOOR, DeltaForm, DeltaWeights
from quire.kernels.states import StateMeta, StateView, convolved, courses


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
    y = torch.zeros(len(qkv), form.heads * form.value_dim, device=qkv.device)
    for one in courses(torch.cat((qkv, decay, strength), 1), state, meta):
        q, k, v = _heads(F.silu(convolved(one.inputs, weights.conv)), form)
        factors = torch.exp(_log_decay(one.rows[:, form.channels : -form.heads].float(), weights, form))
        strengths = one.rows[:, -form.heads :].float().sigmoid() * (1 + form.doubled)
        for i, row, matrix in one.through(state.matrix):
            matrix *= factors[i, :, :, None]
            wrong = v[i] - torch.einsum("hkv,hk->hv", matrix, k[i])
            matrix += k[i, :, :, None] * (strengths[i, :, None] * wrong)[:, None]
            if row >= 0:
                y[row] = torch.einsum("hkv,hk->hv", matrix, q[i]).flatten()
    return normalized(y, gate, weights.norm, form).to(qkv.dtype)


def normalized(y: Tensor, gate: Tensor, norm: Tensor, form: DeltaForm) -> Tensor:
    """Return the outputs [T, H * Dv] of the heads, in float32, normalized and multiplied by their gates."""
    heads = y.unflatten(1, (form.heads, form.value_dim))
    heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + form.eps) * norm
    opened = F.silu(gate.float()) if form.act == "silu" else gate.float().sigmoid()
    return heads.flatten(1) * opened


def _heads(u: Tensor, form: DeltaForm) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys [n, H, Dk] of each head, normalized, and values [n, H, Dv], of u [n, C]."""
    width, per = form.key_heads * form.key_dim, form.heads // form.key_heads
    q, k, v = u.split((width, width, form.heads * form.value_dim), 1)
    q, k = (one.unflatten(1, (form.key_heads, form.key_dim)).repeat_interleave(per, 1) for one in (q, k))
    q, k = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + FLOOR) for one in (q, k))
    return q * form.key_dim**-0.5, k, v.unflatten(1, (form.heads, form.value_dim))


def _log_decay(decay: Tensor, weights: DeltaWeights, form: DeltaForm) -> Tensor:
    """Return g [n, H, Dk or 1]."""
    raw = (decay + weights.shift).unflatten(1, (form.heads, -1))
    rate = weights.rate.exp()[:, None]
    return form.lowest * torch.sigmoid(rate * raw) if form.lowest else -rate * F.softplus(raw)
