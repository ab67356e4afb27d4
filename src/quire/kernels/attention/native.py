"""Paged attention in C.

Rows of decodes and of short chunks read the context in place, one by one. Longer chunks of prompts use AMX tiles, or
vectors in float32, without AMX or with `row_positions`. The C sources are in `quire.kernels.attention_cpu`.
"""

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, KVView
from quire.kernels.attention.cpu import write_kv
from quire.kernels.attention_cpu.native_calls import (
    MAX_DIM,
    attend_chunks,
    attend_prompts,
    attend_rows,
    checked_scores,
    retarget_rows,
)
from quire.kernels.attention_cpu.native_plan import plan_native
from quire.kernels.native.library import missing_amx

__all__ = ["MAX_DIM", "paged_attention", "write_kv"]

WIDEST = 256  # of chunks.c
NO_TILES = missing_amx()


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

    See `quire.kernels.attention`. Raises ValueError for arguments that the C code cannot take.
    """
    scores = checked_scores(scale, soft_cap, sinks, q.shape[1])
    plan = plan_native(meta, kv.block_size, window)
    if plan.num_rows > len(q):
        raise ValueError(
            f"native attention: q must have a row for each of the step's {plan.num_rows} tokens; it has {len(q)} rows"
        )
    out = q.new_empty(q.shape)
    for rows in plan.rows:
        attend_rows(q, kv, meta, plan, rows, scores, out)
    tiles = q.dtype == torch.bfloat16 and q.shape[2] <= WIDEST and not NO_TILES and plan.positions is None
    if plan.chunks and tiles:
        attend_chunks(q, kv, meta, plan, scores, out)
    elif plan.chunks:
        attend_prompts(q, kv, meta, plan, scores, out)
    return out


def rows_only(meta: AttentionMeta, block_size: int, window: int | None = None) -> bool:
    """Return True if a `KernelRecording` can hold the attention of the step.

    It can if no sequence has more than FEW (4) query rows and one call of the C kernel computes all rows.
    """
    plan = plan_native(meta, block_size, window)
    return len(plan.rows) == 1 and not plan.chunks


def retarget(
    recording: int, meta: AttentionMeta, block_size: int, num_heads: int, head_dim: int, window: int | None = None
) -> None:
    """Make the recorded attention calls of a KV group read the block tables and lengths of another step.

    recording             `KernelRecording.address` of the recording with these calls
    meta                  metadata of the group in the other step, for which `rows_only` is true; it must live until
                          after the replay
    num_heads, head_dim   of the group's layers; the most, if they differ
    """
    retarget_rows(recording, meta, plan_native(meta, block_size, window), num_heads, head_dim)
