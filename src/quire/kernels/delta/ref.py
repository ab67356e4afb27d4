"""The gated delta rule as its formulas read, row by row in float32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.delta import FLOOR, DeltaForm, DeltaWeights
from quire.kernels.states import StateMeta, StateView


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
    starts, lengths, slots = (one.tolist() for one in (meta.query_start, meta.seq_lens, meta.slots))
    copies = [dict(zip(meta.kept_at[slot].tolist(), meta.kept[slot].tolist(), strict=True)) for slot in slots]
    for first, end, length, slot, kept in zip(starts, starts[1:], lengths, slots, copies, strict=False):
        if first == end:
            continue
        past, matrix = length - (end - first), state.matrix[slot]
        if past == 0:
            state.columns[slot], matrix[:] = 0, 0
        rows = torch.cat((qkv[first:end], decay[first:end], strength[first:end]), 1)
        replayed, lazy = 0, False
        if state.pending is not None and state.at is not None:
            lazy = len(rows) <= state.pending.shape[1]
            replayed = 0 if past == 0 else min(max(past - int(state.at[slot]), 0), state.pending.shape[1])
            rows = torch.cat((state.pending[slot, :replayed], rows))
            state.at[slot] = past if lazy else length
            if lazy:
                state.pending[slot, : end - first] = rows[replayed:]
        inputs = torch.cat((state.columns[slot], rows[:, : form.channels]))
        q, k, v = _heads(_convolved(inputs.float(), weights.conv), form)
        factors = torch.exp(_log_decay(rows[:, form.channels : -form.heads].float(), weights, form))
        strengths = rows[:, -form.heads :].float().sigmoid() * (1 + form.doubled)
        taps = len(weights.conv) - 1
        for i in range(len(rows)):
            if i == replayed and lazy:
                matrix = matrix.clone()
            matrix *= factors[i, :, :, None]
            wrong = v[i] - torch.einsum("hkv,hk->hv", matrix, k[i])
            matrix += k[i, :, :, None] * (strengths[i, :, None] * wrong)[:, None]
            at = past - replayed + i + 1
            if i >= replayed:
                y[first + i - replayed] = torch.einsum("hkv,hk->hv", matrix, q[i]).flatten()
            if i >= replayed and (row := kept.get(at)) is not None:
                state.matrix[row] = matrix
                state.columns[row] = inputs[i + 1 : i + 1 + taps]
                if state.at is not None:
                    state.at[row] = at
        stays = replayed if lazy else len(rows)
        state.columns[slot] = inputs[stays : stays + taps]
    return normalized(y, gate, weights.norm, form).to(qkv.dtype)


def normalized(y: Tensor, gate: Tensor, norm: Tensor, form: DeltaForm) -> Tensor:
    """Return the outputs [T, H * Dv] of the heads, in float32, normalized and multiplied by their gates."""
    heads = y.unflatten(1, (form.heads, form.value_dim))
    heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + form.eps) * norm
    opened = F.silu(gate.float()) if form.act == "silu" else gate.float().sigmoid()
    return heads.flatten(1) * opened


def _convolved(inputs: Tensor, conv: Tensor) -> Tensor:
    """Return silu of the causal convolution of inputs [K - 1 + n, C] by conv [K, C]: [n, C]."""
    rows = len(inputs) - len(conv) + 1
    return F.silu(sum((inputs[k : k + rows] * conv[k] for k in range(len(conv))), torch.zeros(())))


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
