"""Paged attention, one row at a time, in float32."""

import torch
from torch import Tensor

from quire.contracts.blocks import first_seen
from quire.kernels.attention import AttentionMeta, KVView, as_list
from quire.kernels.attention.eight_bits import encode, gather


def write_kv(k: Tensor, v: Tensor, kv: KVView, kv_slots: Tensor) -> None:
    """Write keys and values to their slots of the cache. See `quire.kernels.attention`."""
    k, v = encode(k, kv.k_scale, kv.k.dtype), encode(v, kv.v_scale, kv.v.dtype)
    for row, slot in enumerate(kv_slots.tolist()):
        block, offset = divmod(slot, kv.block_size)
        kv.k[block, :, offset] = k[row]
        kv.v[block, :, offset] = v[row]


def paged_attention(
    q: Tensor,
    kv: KVView,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of query rows over the paged cache. See `quire.kernels.attention`."""
    out = torch.zeros_like(q)
    starts, lengths = as_list(meta.query_start), as_list(meta.seq_lens)
    group = q.shape[1] // kv.k.shape[1]
    for s, length in enumerate(lengths):
        blocks = meta.block_tables[s, : -(-length // kv.block_size)].long()
        keys, values = (
            gather(side, blocks).transpose(1, 2).flatten(0, 1)[:length].float().repeat_interleave(group, dim=1) * factor
            for side, factor in ((kv.k, kv.k_scale), (kv.v, kv.v_scale))
        )
        num_rows = starts[s + 1] - starts[s]
        for i in range(num_rows):
            position = length - num_rows + i
            if meta.row_positions is not None:
                position = int(meta.row_positions[starts[s] + i])
            first = first_seen(position, window)
            seen = slice(first, position + 1)
            scores = torch.einsum("hd,lhd->hl", q[starts[s] + i].float(), keys[seen]) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.float()[:, None]), dim=1)
            weights = scores.softmax(-1)[:, : position + 1 - first]
            out[starts[s] + i] = torch.einsum("hl,lhd->hd", weights, values[seen]).to(q.dtype)
    return out
