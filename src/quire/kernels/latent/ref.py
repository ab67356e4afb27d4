"""Latent attention, one sequence at a time, in float32."""

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, KVView, Prompt, sequences
from quire.kernels.attention.cpu import write_kv
from quire.kernels.latent import LatentView
from quire.kernels.latent.layouts import check_expanded, check_queries, check_rows
from quire.kernels.latent.parts import split_parts
from quire.kernels.latent.rows import numbers, write_rows
from quire.kernels.norm.ref import rms_norm
from quire.kernels.rope.ref import apply_rope


def prepare(
    q: Tensor, kv: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor, cache: LatentView, kv_slots: Tensor
) -> Tensor:
    """Rotate q in place; write normalized latents and rotated keys to the cache; return q.

    See `quire.kernels.latent`.
    """
    check_rows(q, kv, cache)
    latent, turned = kv[:, None].split([len(norm), cos.shape[1]], dim=2)
    q[..., -cos.shape[1] :] = apply_rope(q[..., -cos.shape[1] :], cos, sin)
    latent, turned = rms_norm(latent, norm, eps), apply_rope(turned, cos, sin)
    if cache.scales is not None:
        write_rows(latent[:, 0], turned[:, 0], cache, kv_slots)
    else:
        write_kv(latent, turned, KVView(cache.latent, cache.rope, cache.scale, cache.scale), kv_slots)
    return q


def project(x: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """Multiply each head of x by its own matrix of `weights` into `out`; return `out`. See `quire.kernels.latent`."""
    torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))
    return out


def absorbed(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: LatentView,
    meta: AttentionMeta,
    scale: float,
    lse: Tensor | None = None,
) -> Tensor:
    """Return softmax-weighted sums of latents [T, H, L]; fast for few query rows. See `quire.kernels.latent`."""
    check_queries(q_latent, q_rope)
    out = torch.zeros(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    for first, last, latent, rope in _contexts(cache, meta, sequences(meta)):
        scores = torch.einsum("mhl,nl->hmn", q_latent[first:last].float(), latent)
        scores += torch.einsum("mhr,nr->hmn", q_rope[first:last].float(), rope)
        scores *= scale
        if lse is None:
            weights = _weights(scores, meta, first)
        else:
            assert last - first == 1, "a row of a divided context is a sequence"
            weights, lse[first] = scores.softmax(2), scores[:, 0].logsumexp(1)
        out[first:last] = torch.einsum("hmn,nl->mhl", weights, latent).to(out.dtype)
    return out


def join(parts: Tensor) -> Tensor:
    """Add up parts [N, T, H, L + W] of attention over divided contexts: [T, H, L]. See `quire.kernels.latent`."""
    assert parts.is_contiguous()
    sums, lse = split_parts(parts)
    top = lse.amax(0)
    weights = (lse - top.masked_fill(top == -torch.inf, 0.0)).exp()
    out = torch.zeros(sums.shape[1:], dtype=torch.float32, device=parts.device)
    for one, weight in zip(sums, weights.unsqueeze(3), strict=True):
        out += torch.where(weight == 0, 0.0, one.float() * weight)
    return (out / weights.sum(0).clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)).to(parts.dtype)


def chosen(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: LatentView,
    meta: AttentionMeta,
    scale: float,
    positions: Tensor,
    first: int = 0,
) -> Tensor:
    """Return softmax-weighted sums of the latents at `positions` [N, H, L]. See `quire.kernels.latent`."""
    check_queries(q_latent, q_rope)
    out = torch.zeros(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    for start, last, latent, rope in _contexts(cache, meta, sequences(meta)):
        for row in range(max(start - first, 0), min(last - first, len(out))):
            own = positions[row][positions[row] >= 0].long()
            scores = q_latent[row].float() @ latent[own].t() + q_rope[row].float() @ rope[own].t()
            out[row] = ((scores * scale).softmax(-1) @ latent[own]).to(out.dtype)
    return out


def expanded(q: Tensor, kv_up: Tensor, cache: LatentView, meta: AttentionMeta, scale: float, out: Tensor) -> Tensor:
    """Compute attention of `meta.prompts` with keys and values made from the latents; return `out`.

    See `quire.kernels.latent`.
    """
    check_expanded(q, kv_up, out)
    plain = q.shape[2] - cache.rope.shape[3]
    for first, last, latent, rope in _contexts(cache, meta, meta.prompts or ()):
        keys, values = torch.einsum("hpl,nl->hnp", kv_up.float(), latent).split([plain, out.shape[2]], dim=2)
        keys = torch.cat((keys, rope.expand(len(keys), -1, -1)), 2)
        scores = torch.einsum("mhp,hnp->hmn", q[first:last].float(), keys)
        out[first:last] = torch.einsum("hmn,hnv->mhv", _weights(scores * scale, meta, first), values).to(out.dtype)
    return out


def _contexts(
    cache: LatentView, meta: AttentionMeta, prompts: tuple[Prompt, ...]
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yield for each sequence: first row, end of its rows, latents [n, L] and rotated keys [n, R] in float32."""
    for first, last, s, past in prompts:
        length, row = past + last - first, s if meta.table_rows is None else meta.table_rows[s]
        blocks = meta.block_tables[row, : -(-length // cache.block_size)].long()
        latent, rope = (side.flatten(0, 1)[:length] for side in numbers(cache, blocks))
        yield first, last, latent, rope


def _weights(scores: Tensor, meta: AttentionMeta, first: int) -> Tensor:
    """Return the causal softmax of scores [H, M, n] of the rows from `first` on, the last of their context of n tokens
    unless `meta` has their positions."""
    rows, length = scores.shape[1:]
    at = torch.arange(length, device=scores.device)
    last = at[length - rows :] if meta.row_positions is None else meta.row_positions[first : first + rows]
    unseen = at > last[:, None]
    return scores.masked_fill(unseen, float("-inf")).softmax(-1)
