"""Latent attention on a CPU through PyTorch's flash kernel; the context of each sequence is gathered once.

`absorbed` uses latent and rotated key of a token, side by side, as key and value of all heads. The flash kernel needs
keys and values of the same width: `absorbed` drops the sums of rotated keys, `expanded` pads short values.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention import AttentionMeta, KVView, Prompt, sequences
from quire.kernels.attention.cpu import attend_chunk, flash
from quire.kernels.attention_cpu.plan import ChunkPlan, plan_chunk
from quire.kernels.latent import LatentView
from quire.kernels.latent.layouts import check_expanded, check_queries
from quire.kernels.latent.ref import join, prepare, project
from quire.kernels.latent.rows import numbers

__all__ = ["absorbed", "chosen", "expanded", "join", "prepare", "project"]

GATHERED = 1 << 22  # numbers of chosen tokens that are gathered at a time


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
    out, q = torch.empty(q_latent.shape, dtype=q_latent.dtype), torch.cat((q_latent, q_rope), 2)
    scale = scale * cache.scale
    for chunk in _chunks(cache, meta, sequences(meta)):
        if lse is not None and not chunk.total:
            lse[chunk.first] = -torch.inf
            continue
        both = torch.cat(_sides(cache, chunk, q.dtype), 1).view(1, 1, -1, q.shape[2])
        if lse is not None:
            assert chunk.last - chunk.first == 1, "a row of a divided context is a sequence"
            seen = both[:, :, : chunk.total]
            attended, sums = flash(q[None, chunk.first : chunk.last], seen, seen, scale)
            out[chunk.first] = attended[0, 0, :, : out.shape[2]] * cache.scale
            lse[chunk.first] = sums[0, 0]
            continue
        attended = _attend(q[chunk.first : chunk.last], both, both, chunk, meta, scale)
        out[chunk.first : chunk.last] = attended[..., : out.shape[2]] * cache.scale
    return out


def chosen(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: LatentView,
    meta: AttentionMeta,
    scale: float,
    positions: Tensor,
    first: int = 0,
) -> Tensor:
    """Return softmax-weighted sums of the latents at `positions` [N, H, L]. See `quire.kernels.latent`.

    The tokens of some rows are gathered, and multiplied with all heads of each row.
    """
    check_queries(q_latent, q_rope)
    out, q = torch.empty(q_latent.shape, dtype=q_latent.dtype), torch.cat((q_latent, q_rope), 2).float()
    width, size = q_latent.shape[2], cache.block_size
    rows = max(1, GATHERED // (positions.shape[1] * q.shape[2]))
    for start, last, s, _ in sequences(meta):
        table = meta.block_tables[s if meta.table_rows is None else int(meta.table_rows[s])].long()
        end = min(last - first, len(q))
        for begin in range(max(start - first, 0), end, rows):
            own = positions[begin : min(begin + rows, end)].long()
            none = own < 0
            own = own.clamp(min=0)
            place = table[own // size], own % size
            both = torch.cat(numbers(cache, place), 2)
            scores = torch.bmm(q[begin : begin + len(own)], both.transpose(1, 2)).mul_(scale)
            weights = scores.masked_fill_(none[:, None], -torch.inf).softmax(-1)
            out[begin : begin + len(own)] = torch.bmm(weights, both[..., :width])
    return out


def expanded(q: Tensor, kv_up: Tensor, cache: LatentView, meta: AttentionMeta, scale: float, out: Tensor) -> Tensor:
    """Compute attention of `meta.prompts` with keys and values made from the latents; return `out`.

    See `quire.kernels.latent`.
    """
    check_expanded(q, kv_up, out)
    value, scale = out.shape[2], scale * cache.scale
    width = max(q.shape[2], value)
    for chunk in _chunks(cache, meta, meta.prompts or ()):
        latent, rope = (side[: chunk.total].to(q.dtype) for side in _sides(cache, chunk, q.dtype))
        made = F.linear(latent, kv_up.flatten(0, 1)).unflatten(1, kv_up.shape[:2]).transpose(0, 1)
        keys = torch.cat((made[..., :-value], rope.expand(len(made), -1, -1)), 2)
        queries, keys, values = (
            F.pad(side, (0, width - side.shape[2])) for side in (q[chunk.first : chunk.last], keys, made[..., -value:])
        )
        attended = _attend(queries, keys[None], values[None], chunk, meta, scale)
        out[chunk.first : chunk.last] = attended[..., :value] * cache.scale
    return out


def _sides(cache: LatentView, chunk: ChunkPlan, dtype: torch.dtype) -> list[Tensor]:
    """Return latents [tokens, L] and rotated keys [tokens, R] of a sequence's blocks; codes, if all have one scale."""
    if cache.scales is None:
        return [side[chunk.blocks].flatten(0, 2) for side in (cache.latent, cache.rope)]
    return [side.flatten(0, 1).to(dtype) for side in numbers(cache, chunk.blocks)]


def _chunks(cache: LatentView, meta: AttentionMeta, prompts: tuple[Prompt, ...]) -> Iterator[ChunkPlan]:
    return (plan_chunk(meta, s, first, last, past + last - first, cache.block_size) for first, last, s, past in prompts)


def _attend(q: Tensor, keys: Tensor, values: Tensor, chunk: ChunkPlan, meta: AttentionMeta, scale: float) -> Tensor:
    """Compute attention of a sequence's rows q [M, H, D] over its context.

    keys, values   [1, 1 or H, tokens or more, D]: the whole context as one block
    """
    whole = replace(chunk, blocks=chunk.blocks.new_zeros(1))
    positions = None if meta.row_positions is None else meta.row_positions[chunk.first : chunk.last]
    return attend_chunk(q.contiguous(), KVView(keys, values), whole, scale, positions)
