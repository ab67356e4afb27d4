"""Calls of the C attention kernels: checked tensors of a layer, with the step's plan (`native_plan.py`)."""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, KVView
from quire.kernels.attention_cpu.native_plan import (
    NONE_BAD,
    STEP,
    ChunkPass,
    NativePlan,
    RowPlan,
    chunk_passes,
    partial_of,
    plan_rows,
)
from quire.kernels.native import memory
from quire.kernels.native.library import loaded

MAX_DIM = 512  # of rows.c
ROWS = 32  # of chunks.c


@dataclass(frozen=True)
class Scores:
    """Arguments of a layer that turn q . k into weights. The window is in the plan.

    soft_cap   0: no cap
    sinks      [Hq] float32, contiguous; None: no sinks
    """

    scale: float
    soft_cap: float = 0.0
    sinks: Tensor | None = None

    def sinks_from(self, head: int) -> int | None:
        """Return the address of the sink of a query head. None: no sinks."""
        return None if self.sinks is None else self.sinks.data_ptr() + 4 * head


def checked_scores(scale: float, soft_cap: float | None, sinks: Tensor | None, num_heads: int) -> Scores:
    """Return the `Scores` of a call. Raises ValueError for a soft cap or sinks that the kernels cannot take."""
    if soft_cap is not None and not 0 < soft_cap < inf:
        raise ValueError(f"native attention: a soft cap must be above 0 and finite; it is {soft_cap}")
    if sinks is not None:
        if tuple(sinks.shape) != (num_heads,) or not sinks.is_cpu:
            raise ValueError(
                f"native attention: sinks must be [{num_heads}], one for each query head, on the CPU; they are "
                f"{tuple(sinks.shape)} on {sinks.device}"
            )
        sinks = sinks.float().contiguous()
    return Scores(scale, soft_cap or 0.0, sinks)


def attend_prompts(q: Tensor, kv: KVView, meta: AttentionMeta, plan: NativePlan, scores: Scores, out: Tensor) -> None:
    """Compute the chunks of a step with vectors. Writes the chunks' rows of `out`."""
    k, tables = kv.k, meta.block_tables
    num_heads, dim = q.shape[1:]
    _check(q, kv, tables)
    loaded().quire_attend_prompts(
        q.data_ptr(),
        out.data_ptr(),
        k.data_ptr(),
        kv.v.data_ptr(),
        tables.data_ptr(),
        plan.prompts.data_ptr(),
        None if plan.positions is None else plan.positions.data_ptr(),
        scores.sinks_from(0),
        len(plan.prompts),
        num_heads,
        k.shape[1],
        dim,
        q.stride(0),
        kv.block_size,
        k.stride(0),
        k.stride(1),
        tables.stride(0),
        plan.window or 0,
        scores.scale,
        scores.soft_cap,
        q.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )


def attend_chunks(q: Tensor, kv: KVView, meta: AttentionMeta, plan: NativePlan, scores: Scores, out: Tensor) -> None:
    """Compute the chunks of a step with AMX tiles. Writes the chunks' rows of `out`."""
    k, tables = kv.k, meta.block_tables
    num_heads, dim, num_kv_heads = q.shape[1], q.shape[2], k.shape[1]
    _check(q, kv, tables)
    passes = plan.passes.get((num_kv_heads, dim))
    if passes is None:
        passes = plan.passes[num_kv_heads, dim] = chunk_passes(plan.chunks, num_kv_heads, dim, plan.window)
    size = max(one.size for one in passes)
    if plan.scratch is None or len(plan.scratch) < size:
        plan.scratch = memory.empty((size,), torch.bfloat16)
    group = num_heads // num_kv_heads
    for one in passes:
        for head in range(0, num_kv_heads, one.heads):
            heads = min(one.heads, num_kv_heads - head)
            first, from_kv = head * group * dim * q.element_size(), head * k.stride(1) * k.element_size()
            loaded().quire_attend_chunks(
                q.data_ptr() + first,
                out.data_ptr() + first,
                k.data_ptr() + from_kv,
                kv.v.data_ptr() + from_kv,
                tables.data_ptr(),
                one.items.data_ptr(),
                plan.scratch.data_ptr(),
                scores.sinks_from(head * group),
                len(one.items),
                heads * group,
                heads,
                dim,
                q.stride(0),
                out.stride(0),
                kv.block_size,
                k.stride(0),
                k.stride(1),
                tables.stride(0),
                plan.window or 0,
                scores.scale,
                scores.soft_cap,
                torch.get_num_threads(),
            )
        if int(one.items[:, 5].min()) < NONE_BAD:
            _attend_again(q, kv, meta, plan, one, scores, out)


def _attend_again(
    q: Tensor, kv: KVView, meta: AttentionMeta, plan: NativePlan, one: ChunkPass, scores: Scores, out: Tensor
) -> None:
    """Compute again the rows shortly before a value that is not finite; with a window all rows after it, too.

    The task of a row before may have read the value: it reads up to ROWS - 1 tokens past a row. Without a window, rows
    that see the value are not finite either way. Tasks of later rows may have read a value that the rows see no more.
    """
    rows: list[tuple[int, int, int]] = []
    for first, num_rows, length, table, _, group, _ in one.items.tolist():
        past = length - num_rows
        end = length if plan.window else min(length, (group + 1) * STEP)
        near = range(max(past, group * STEP - ROWS + 1), end)
        rows += [(first + position - past, position + 1, table) for position in near]
    one.items[:, 5] = NONE_BAD
    for few in plan_rows(rows, plan.window) if rows else ():
        attend_rows(q, kv, meta, plan, few, scores, out)


def _check(q: Tensor, kv: KVView, tables: Tensor) -> None:
    """Check types, devices, shapes and strides, which the C code does not check; raise ValueError."""
    k, v = kv.k, kv.v
    (_, heads, dim), shape, stride = q.shape, k.shape, k.stride()
    if not (q.is_cpu and k.is_cpu and v.is_cpu and tables.is_cpu):
        raise ValueError(
            f"native attention: all tensors must be on the CPU; q is on {q.device}, the cache on "
            f"{k.device}, block tables on {tables.device}"
        )
    if q.dtype not in (torch.float32, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"native attention: q and the cache must all be float32 or all bfloat16; they are {q.dtype} and {k.dtype}"
        )
    if dim > MAX_DIM or shape[3] != dim or v.shape != shape or heads % shape[1]:
        raise ValueError(
            f"native attention: q, K and V must have one head size of at most {MAX_DIM}, and the number "
            f"of query heads must be a multiple of the KV heads; the shapes of q, K and V are "
            f"{tuple(q.shape)}, {tuple(shape)}, {tuple(v.shape)}"
        )
    if q.stride()[1:] != (dim, 1) or v.stride() != stride or stride[2:] != (dim, 1):
        raise ValueError(
            f"native attention: q must be contiguous inside a token, the cache inside a head of a block, "
            f"and K and V must have the same strides; the strides of q, K and V are {q.stride()}, "
            f"{stride}, {v.stride()}"
        )
    if tables.dtype != torch.int32 or tables.stride(1) != 1:
        raise ValueError(
            f"native attention: block tables are {tables.dtype} with strides {tables.stride()}; they must "
            "be int32 with stride 1 inside a row"
        )


def attend_rows(
    q: Tensor, kv: KVView, meta: AttentionMeta, plan: NativePlan, rows: RowPlan, scores: Scores, out: Tensor
) -> None:
    """Compute rows of a step one by one. Writes these rows of `out`."""
    k, v, tables = kv.k, kv.v, meta.block_tables
    num_heads, dim, num_kv_heads = q.shape[1], q.shape[2], k.shape[1]
    _check(q, kv, tables)
    loaded().quire_attend_rows(
        q.data_ptr(),
        out.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        tables.data_ptr(),
        rows.items.data_ptr(),
        rows.part_item.data_ptr(),
        partial_of(plan, rows, num_heads, dim),
        scores.sinks_from(0),
        len(rows.items),
        len(rows.part_item),
        num_heads,
        num_kv_heads,
        dim,
        q.stride(0),
        kv.block_size,
        k.stride(0),
        k.stride(1),
        tables.stride(0),
        scores.scale,
        scores.soft_cap,
        q.dtype == torch.bfloat16,
        meta.kv_group,
        torch.get_num_threads(),
    )


def retarget_rows(recording: int, meta: AttentionMeta, plan: NativePlan, num_heads: int, head_dim: int) -> None:
    """Make the recorded calls of a KV group compute the rows of another step. See `quire.kernels.attention.native`."""
    tables = meta.block_tables
    assert not plan.chunks, "asked rows_only?"
    (rows,) = plan.rows
    if tables.dtype != torch.int32 or tables.stride(1) != 1:
        raise ValueError(
            f"native attention: block tables are {tables.dtype} with strides {tables.stride()}; they must "
            "be int32 with stride 1 inside a row"
        )
    loaded().quire_retarget_rows(
        recording,
        tables.data_ptr(),
        rows.items.data_ptr(),
        rows.part_item.data_ptr(),
        partial_of(plan, rows, num_heads, head_dim),
        len(rows.items),
        len(rows.part_item),
        tables.stride(0),
        meta.kv_group,
    )
