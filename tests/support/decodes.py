"""Steps of decodes for kernels that take the projection."""

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, KVView, inputs
from quire.kernels.attention.inputs import Case
from quire.kernels.joined.inputs import HeadInputs


def decode_step(case: Case, dtype: torch.dtype, *, normed: bool) -> tuple[Tensor, HeadInputs, KVView, AttentionMeta]:
    """Return a step of decodes: projection, norm and angles, a cache without the newest tokens, lengths."""
    _, kv, meta = inputs.make(case, dtype)
    (num_heads, kv_heads), dim, tokens = case.heads, case.head_dim, sum(case.query_lens)
    torch.manual_seed(tokens + dim)
    wide = torch.randn(tokens, (num_heads + 2 * kv_heads + 1) * dim).mul_(2).to(dtype)
    angles = torch.rand(tokens, dim // 2) * 6.28
    cos, sin = angles.cos(), angles.sin()
    norm = (torch.rand(num_heads + kv_heads, dim) + 0.5).to(dtype) if normed else None
    given = HeadInputs(norm, 1e-6, torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))
    for slot in meta.kv_slots.tolist():
        kv.k[slot // case.block_size, :, slot % case.block_size] = float("nan")
        kv.v[slot // case.block_size, :, slot % case.block_size] = float("nan")
    assert isinstance(meta.query_start, Tensor) and isinstance(meta.seq_lens, Tensor)
    meta = replace(  # with a padded sequence
        meta,
        query_start=torch.cat((meta.query_start, meta.query_start[-1:])),
        seq_lens=torch.cat((meta.seq_lens, torch.zeros(1, dtype=torch.int32))),
        block_tables=torch.cat((meta.block_tables, meta.block_tables[:1])),
        max_query_len=max(case.query_lens),
        decode_len=max(case.query_lens),
    )
    return wide[:, dim:].view(tokens, -1, dim), given, kv, meta
