"""Scores of an indexer and the best of them, one sequence at a time. Scores are summed in float64, then rounded."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention import AttentionMeta
from quire.kernels.attention.eight_bits import MOST, gather
from quire.kernels.index import Chosen, IndexView, longer
from quire.kernels.rope.ref import apply_rope

TILE = 16  # rows whose scores are in memory at a time
LEAST = 1e-4  # the smallest magnitude of a key for which a scale is made


def prepare(
    q: Tensor, k: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor, cache: IndexView, kv_slots: Tensor
) -> Tensor:
    """Rotate q in place; write normalized, rotated keys to the cache; return q. See `quire.kernels.index`."""
    rotated, dim = cos.shape[1], k.shape[1]
    key = F.layer_norm(k.float(), (dim,), *norm.float(), eps).to(k.dtype)[:, None]
    for one in (q, key):
        one[..., :rotated] = apply_rope(one[..., :rotated], cos, sin)
    write_keys(key[:, 0], cache, kv_slots)
    return q


def write_keys(keys: Tensor, cache: IndexView, kv_slots: Tensor) -> None:
    """Write keys [T, D] to their slots of the cache."""
    block, offset = kv_slots // cache.block_size, kv_slots % cache.block_size
    if cache.scales is None:
        cache.keys[block, 0, offset] = keys
        return
    most = MOST[cache.keys.dtype]
    largest = keys.float().abs().amax(1, keepdim=True).clamp(min=LEAST)
    scales = torch.exp2(torch.ceil(torch.log2(largest / most)))
    codes = (keys.float() / scales).clamp(-most, most).to(cache.keys.dtype)
    cache.keys.view(torch.uint8)[block, 0, offset] = codes.view(torch.uint8)
    cache.scales[block, 0, offset] = scales


def room(rows: int, meta: AttentionMeta, top_k: int, device: torch.device) -> Chosen:
    """Return the sequences whose rows choose, and memory for their choice. See `quire.kernels.index`."""
    found = longer(meta, top_k)
    count = sum(last - first for first, last, *_ in found)
    return Chosen(found, torch.empty(count, top_k, dtype=torch.int32, device=device))


def keep_last(chosen: Chosen, meta: AttentionMeta) -> Tensor:
    """Return the tokens of each sequence's last row. See `quire.kernels.index`."""
    top_k, end = chosen.positions.shape[1], 0
    kept = torch.arange(top_k, dtype=torch.int32, device=chosen.positions.device).repeat(len(meta.seq_lens), 1)
    for first, last, s, _ in chosen.sequences:
        end += last - first
        kept[s] = chosen.positions[end - 1]
    return kept


def reuse(kept: Tensor, meta: AttentionMeta) -> Chosen:
    """Return the tokens of one row of each sequence. See `quire.kernels.index`."""
    found = longer(meta, kept.shape[1])
    return Chosen(found, kept[[s for _, _, s, _ in found]])


def choose(q: Tensor, weights: Tensor, cache: IndexView, meta: AttentionMeta, top_k: int) -> Chosen:
    """Return the best tokens of each row. See `quire.kernels.index`."""
    found, some = longer(meta, top_k), list[Tensor]()
    for first, last, s, past in found:
        length, row = past + last - first, s if meta.table_rows is None else int(meta.table_rows[s])
        blocks = meta.block_tables[row, : -(-length // cache.block_size)].long()
        keys = gather(cache.keys, blocks).flatten(0, 2)[:length].double()
        if cache.scales is not None:
            keys = keys * cache.scales[blocks].flatten(0, 2)[:length]
        at = torch.arange(length, device=q.device)
        for begin in range(first, last, TILE):
            end = min(begin + TILE, last)
            products = torch.einsum("thd,sd->ths", q[begin:end].double(), keys).clamp_(min=0)
            scores = torch.einsum("ths,th->ts", products, weights[begin:end].double()).float()
            scores = scores.masked_fill(scores.isnan(), torch.inf)
            own = at[past + begin - first : past + end - first]  # positions of the rows
            scores = scores.masked_fill(at > own[:, None], -torch.inf)
            order = torch.sort(scores, dim=1, descending=True, stable=True).indices
            best = order[:, :top_k].sort(1).values
            some.append(best.masked_fill(best > own[:, None], -1))
    return Chosen(found, torch.cat(some).int() if some else q.new_empty(0, top_k, dtype=torch.int32))
