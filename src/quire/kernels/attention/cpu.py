"""Paged attention on a CPU through PyTorch's flash kernel, which also returns each row's log-sum-exp.

Decodes treat blocks as a batch: block b of the arena is keys [Hkv, block_size, D], its query rows are the heads that
share a KV head. Outputs of a sequence's blocks are merged by log-sum-exp (Dao, 2023, flash-decoding). A chunk of a
prompt gathers its context once. It attends to the past without a mask, and to itself with a causal mask. Both layouts
were the fastest of those measured at 128 to 3072 tokens of context (at 1024 tokens of bfloat16 in blocks of 32, 8 KV
heads of 128, 2 cores: strided 303 us, gathered 738, batched products 508).
"""

import math

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, KVView, as_list
from quire.kernels.attention.eight_bits import encode, is_coded
from quire.kernels.attention_cpu.plan import ChunkPlan, Copied, DecodePlan, Merge, Run, Tail, plan_chunk, plan_step


def missing() -> str:
    """Return the reason why this build of PyTorch has no flash kernel for CPUs, or ""."""
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return "this PyTorch has no flash attention for CPUs"
    return ""


def write_kv(k: Tensor, v: Tensor, kv: KVView, kv_slots: Tensor) -> None:
    """Write keys and values to their slots of the cache. See `quire.kernels.attention`."""
    size = kv.block_size
    place = (kv_slots // size, kv_slots % size)
    kv.k.transpose(1, 2).index_put_(place, encode(k, kv.k_scale, kv.k.dtype))
    kv.v.transpose(1, 2).index_put_(place, encode(v, kv.v_scale, kv.v.dtype))


def paged_attention(
    q: Tensor,
    kv: KVView,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of query rows over the paged cache.

    See `quire.kernels.attention`. Window, soft cap and sinks are not supported and must be None.
    """
    assert all(one is None for one in (window, soft_cap, sinks)), "selected for features it does not declare"
    if not is_coded(kv.k):
        return _attention(q, kv, meta, scale)
    return _attention(q, kv, meta, scale * kv.k_scale).mul_(kv.v_scale)


def _attention(q: Tensor, kv: KVView, meta: AttentionMeta, scale: float) -> Tensor:
    """Attention to the codes of an 8-bit cache, or to the numbers of another."""
    if meta.row_positions is not None:
        return _chosen_rows(q, kv, meta, scale)
    plan = plan_step(meta, kv.block_size)
    decode = plan.decode
    if decode is not None and decode.rows is None:
        return _decode(q, kv, decode, scale)
    out = torch.empty_like(q)
    if decode is not None and decode.rows is not None:
        out[decode.rows] = _decode(q[decode.rows], kv, decode, scale)
    for chunk in plan.chunks:
        out[chunk.first : chunk.last] = attend_chunk(q[chunk.first : chunk.last], kv, chunk, scale)
    return out


def _chosen_rows(q: Tensor, kv: KVView, meta: AttentionMeta, scale: float) -> Tensor:
    """Attention of rows with positions of their own, one sequence after another."""
    out, starts = torch.empty_like(q), as_list(meta.query_start)
    assert meta.row_positions is not None
    for s, length in enumerate(as_list(meta.seq_lens)):
        if starts[s] < starts[s + 1]:
            chunk = plan_chunk(meta, s, starts[s], starts[s + 1], length, kv.block_size)
            rows = slice(chunk.first, chunk.last)
            out[rows] = attend_chunk(q[rows], kv, chunk, scale, meta.row_positions[rows])
    return out


def flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """q [B, H, M, D], k and v [B, H, L, D] of any type -> output [B, H, M, D], log-sum-exp [B, H, M] float32.

    If the softmax of a row is NaN, at least one output value of the row is NaN, too. The kernel alone does not do so:
    with an infinite score it may give finite output and an infinite log-sum-exp; without any finite score it gives 0
    and 0 (then the first key, which every row sees, is not finite). The host reads nothing for this.
    """
    k, v = k.to(q.dtype), v.to(q.dtype)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    first_key = k[:, :, 0].float().mul(0).sum(-1, keepdim=True)  # 0 or NaN
    doubt = torch.where(lse == 0, first_key, lse - lse)
    output[..., 0].add_(doubt)
    return output, lse


def _decode(q: Tensor, kv: KVView, plan: DecodePlan, scale: float) -> Tensor:
    """q [S, Hq, D], one row per sequence -> [S, Hq, D]."""
    rows, heads, dim = q.shape
    kv_heads = kv.k.shape[1]
    grouped = q.view(rows, kv_heads, heads // kv_heads, dim)
    parts = [_attend(grouped, kv, call, scale) for call in plan.calls]
    if len(parts) == 1:
        output, lse = parts[0]
    else:
        output, lse = torch.cat([o for o, _ in parts]), torch.cat([s for _, s in parts])
    if len(plan.merges) == 1:
        return _merge(output, lse, plan.merges[0]).view(rows, heads, dim)
    merged = torch.empty_like(grouped)
    for merge in plan.merges:
        merged[merge.rows] = _merge(output, lse, merge)
    return merged.view(rows, heads, dim)


def _attend(q: Tensor, kv: KVView, call: Run | Tail | Copied, scale: float) -> tuple[Tensor, Tensor]:
    """q [S, Hkv, G, D] -> output [n, Hkv, G, D] and log-sum-exp [n, Hkv, G] of the call's n blocks."""
    if isinstance(call, Tail):
        seen = slice(call.block, call.block + 1)
        return flash(q, kv.k[seen, :, : call.num_tokens], kv.v[seen, :, : call.num_tokens], scale)
    owned = q.expand(len(call.owners), -1, -1, -1) if len(q) == 1 else q.index_select(0, call.owners)
    if isinstance(call, Run):
        return flash(owned, kv.k[call.start : call.stop], kv.v[call.start : call.stop], scale)
    k, v = (side.index_select(0, call.blocks).to(q.dtype) for side in (kv.k, kv.v))
    if call.mask is not None:  # values past the end may be NaN, and 0 * NaN is NaN: a mask alone is not enough
        keep = call.keep[k.dtype]
        for side in (k, v):
            side[-len(keep) :].view(keep.dtype).bitwise_and_(keep)
    return flash(owned, k, v, scale, mask=call.mask)


def _merge(output: Tensor, lse: Tensor, merge: Merge) -> Tensor:
    """Merge the parts of every row, weighted by exp(log-sum-exp) -> [R, Hkv, G, D].

    `parts` never holds a block without an owner (a gap in a run), whose output is meaningless, nor a fully masked
    block, whose log-sum-exp would be 0. Padding gets weight 0.
    """
    if merge.parts is None:
        output, lse = output[None], lse[None]
    else:
        parts = merge.parts.view(-1)
        output = output.index_select(0, parts).view(*merge.parts.shape, *output.shape[1:])
        lse = lse.index_select(0, parts).view(*merge.parts.shape, *lse.shape[1:])
    if output.shape[1] == 1:
        return output[:, 0]
    weights = lse
    if merge.dead is not None:
        weights = weights.masked_fill(merge.dead[:, :, None, None], float("-inf"))
    weights = weights.softmax(1).unsqueeze(-1)
    return torch.mul(output, weights).sum(1).to(output.dtype)


def attend_chunk(q: Tensor, kv: KVView, chunk: ChunkPlan, scale: float, positions: Tensor | None = None) -> Tensor:
    """Return the attention [M, Hq, D] of a prompt chunk: M query rows of a sequence, the last ones of its context.

    positions   [M] ascending positions of the rows, if they may be others. A value that is not finite then shows in
                earlier rows of the sequence, too
    """
    rows, heads, dim = q.shape
    kv_heads = kv.k.shape[1]
    group = heads // kv_heads
    # Indexing, because index_select along dim 1 of a strided view copies the whole arena first.
    k, v = (
        side[chunk.blocks].to(q.dtype).transpose(0, 1).reshape(kv_heads, 1, -1, dim).expand(-1, group, -1, -1)
        for side in (kv.k, kv.v)
    )
    grouped = q.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)
    if positions is not None and int(positions[0]) != chunk.past:
        unseen = torch.arange(chunk.total) > positions[:, None]
        mask = torch.zeros(unseen.shape, dtype=q.dtype).masked_fill_(unseen, float("-inf"))
        output, _ = flash(grouped, k[:, :, : chunk.total], v[:, :, : chunk.total], scale, mask=mask)
        return output.permute(2, 0, 1, 3).reshape(rows, heads, dim)
    now = slice(chunk.past, chunk.total)
    output, lse = flash(grouped, k[:, :, now], v[:, :, now], scale, causal=True)
    sound = _num_sound(v[:, 0, now])
    if 0 < sound < rows:  # the kernel gives later tokens weight 0, and 0 * NaN is NaN: once more without them
        alone = slice(chunk.past, chunk.past + sound)
        output[:, :, :sound] = flash(grouped[:, :, :sound], k[:, :, alone], v[:, :, alone], scale, causal=True)[0]
    if chunk.past:
        before, before_lse = flash(grouped, k[:, :, : chunk.past], v[:, :, : chunk.past], scale)
        weight = torch.sigmoid(before_lse - lse).unsqueeze(-1)  # exp(b) / (exp(a) + exp(b))
        output = torch.lerp(output.float(), before.float(), weight).to(q.dtype)
    return output.permute(2, 0, 1, 3).reshape(rows, heads, dim)


def _num_sound(v: Tensor) -> int:
    """v [Hkv, M, D] -> number of tokens before the first one with a value that is not finite."""
    if math.isfinite(v.sum().item()):
        return v.shape[1]
    return int(v.isfinite().all(-1).all(0).int().cumprod(0).sum())
