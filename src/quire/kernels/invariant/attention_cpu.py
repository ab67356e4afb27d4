"""Paged attention in C, row by row: `quire.kernels.attention.native` without its kernels for chunks of prompts.

A row reads its context in parts of 512 tokens from the first token that it sees, and adds the parts in order. The
kernels for chunks add in another order, so a token of a prompt would have other bits than the same token in a decode.
"""

from math import inf

from torch import Tensor

from quire.kernels.attention import AttentionMeta, KVView
from quire.kernels.attention.cpu import write_kv
from quire.kernels.attention_cpu.native_calls import attend_rows, checked_scores, retarget_rows
from quire.kernels.attention_cpu.native_plan import NativePlan, plan_native

__all__ = ["paged_attention", "retarget", "rows_only", "write_kv"]


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
    scores = checked_scores(scale, soft_cap, sinks, q.shape[1])
    plan = _plan(meta, kv.block_size, window)
    assert plan.num_rows <= len(q), "q has a row for each token of the step"
    out = q.new_empty(q.shape)
    for rows in plan.rows:
        attend_rows(q, kv, meta, plan, rows, scores, out)
    return out


def rows_only(meta: AttentionMeta, block_size: int, window: int | None = None) -> bool:
    """Return True if one call of the C kernel computes all rows of the step: then a recording can hold it."""
    return len(_plan(meta, block_size, window).rows) == 1


def retarget(
    recording: int, meta: AttentionMeta, block_size: int, num_heads: int, head_dim: int, window: int | None = None
) -> None:
    """Make the recorded calls of a KV group compute the rows of another step. See `quire.kernels.attention.native`."""
    retarget_rows(recording, meta, _plan(meta, block_size, window), num_heads, head_dim)


def _plan(meta: AttentionMeta, block_size: int, window: int | None) -> NativePlan:
    return plan_native(meta, block_size, window, few=inf)
