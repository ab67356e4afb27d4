"""Paged attention in C: rows of decodes and of short chunks without copying the context (native.c), longer chunks of
prompts on AMX tiles (native_chunks.c) or, in float32 and without AMX, through PyTorch's flash kernel (`cpu.py`).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, KVView, as_list
from quire.kernels.attention.cpu import SUPPORT as CHUNKS
from quire.kernels.attention.cpu import attend_chunk, write_kv
from quire.kernels.attention.plan import ChunkPlan, plan_chunk
from quire.kernels.native import memory
from quire.kernels.native.library import loaded, missing
from quire.kernels.select import Support

__all__ = ["SUPPORT", "paged_attention", "write_kv"]

SUPPORT = Support(devices=CHUNKS.devices, dtypes=CHUNKS.dtypes, missing=missing() or CHUNKS.missing)
PART, MAX_DIM = 512, 512  # of native.c
STEP, WIDEST = 32, 256  # of native_chunks.c
NO_TILES = missing("amx_tile", "amx_bf16", "avx512_bf16")
FEW = 4  # query rows of a sequence that are done one by one


@dataclass(frozen=True)
class RowPlan:
    """All rows that are done one by one.

    items [R, 4] int64 and part_item [P] int32 as native.c describes them; `split`: some context has several parts
    """

    items: Tensor
    part_item: Tensor
    split: bool


@dataclass
class StepPlan:
    """The rows of a step (None without any) and its chunks.

    items, packed   of the chunks [C, 5] int64, and room for their keys and values, as native_chunks.c describes them;
                    None until a layer needs them
    """

    rows: RowPlan | None
    chunks: tuple[ChunkPlan, ...]
    items: Tensor | None = None
    packed: Tensor | None = None


def paged_attention(
    q: Tensor,
    kv: KVView,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `quire.kernels.attention`. No window, soft cap or sinks (declared in SUPPORT)."""
    assert window is None and soft_cap is None and sinks is None, "selected for features it does not declare"
    plan = meta.plans.get(kv.block_size)
    if not isinstance(plan, StepPlan):
        plan = meta.plans[kv.block_size] = _plan(meta, kv.block_size)
    out = q.new_empty(q.shape)
    if plan.rows is not None:
        _attend_rows(q, kv, meta.block_tables, plan.rows, scale, out)
    if plan.chunks and q.dtype == torch.bfloat16 and q.shape[2] <= WIDEST and not NO_TILES:
        _attend_chunks(q, kv, meta.block_tables, plan, scale, out)
    else:
        for chunk in plan.chunks:
            out[chunk.first : chunk.last] = attend_chunk(q[chunk.first : chunk.last], kv, chunk, scale)
    return out


def _plan(meta: AttentionMeta, block_size: int) -> StepPlan:
    starts, lengths = as_list(meta.query_start), as_list(meta.seq_lens)
    rows: list[tuple[int, int, int]] = []  # row, tokens it sees, sequence
    chunks = []
    for s, length in enumerate(lengths):
        first, last = starts[s], starts[s + 1]
        if last - first > FEW:
            chunks.append(plan_chunk(meta, s, first, last, length, block_size))
        else:
            rows += [(row, length - last + row + 1, s) for row in range(first, last)]
    return StepPlan(_plan_rows(rows) if rows else None, tuple(chunks))


def _plan_rows(rows: list[tuple[int, int, int]]) -> RowPlan:
    items = np.empty((len(rows), 4), np.int64)
    items[:, :3] = rows
    parts = -(-items[:, 1] // PART)
    items[:, 3] = np.cumsum(parts) - parts
    part_item = np.repeat(np.arange(len(rows), dtype=np.int32), parts)
    return RowPlan(torch.from_numpy(items), torch.from_numpy(part_item), len(part_item) > len(rows))


def _attend_chunks(q: Tensor, kv: KVView, tables: Tensor, plan: StepPlan, scale: float, out: Tensor) -> None:
    k = kv.k
    num_heads, dim, num_kv_heads = q.shape[1], q.shape[2], k.shape[1]
    _check(q, kv, tables)
    if plan.items is None or plan.packed is None:
        plan.items, size = _chunk_items(plan.chunks, num_kv_heads, dim)
        plan.packed = memory.empty((size,), torch.bfloat16)
    loaded().quire_attend_chunks(
        q.data_ptr(), out.data_ptr(), k.data_ptr(), kv.v.data_ptr(), tables.data_ptr(), plan.items.data_ptr(),
        plan.packed.data_ptr(), len(plan.items), num_heads, num_kv_heads, dim, q.stride(0), kv.block_size, k.stride(0),
        k.stride(1), tables.stride(0), scale, torch.get_num_threads(),
    )  # fmt: skip


def _chunk_items(chunks: tuple[ChunkPlan, ...], num_kv_heads: int, dim: int) -> tuple[Tensor, int]:
    """What native_chunks.c wants to know of each chunk, and the elements of scratch they take together."""
    items, at = [], 0
    for chunk in chunks:
        items.append((chunk.first, chunk.last - chunk.first, chunk.total, chunk.sequence, at))
        at += 2 * num_kv_heads * (-(-chunk.total // STEP) * STEP) * (-(-dim // STEP) * STEP)
    return torch.tensor(items, dtype=torch.int64), at


def _check(q: Tensor, kv: KVView, tables: Tensor) -> None:
    """What C takes for granted."""
    dim = q.shape[2]
    assert q.stride()[1:] == (dim, 1) and kv.k.stride() == kv.v.stride() and kv.k.stride()[2:] == (dim, 1)
    assert tables.dtype == torch.int32 and tables.stride(1) == 1 and q.dtype == kv.k.dtype
    assert dim <= MAX_DIM, f"heads of {dim} are wider than {MAX_DIM}"


def _attend_rows(q: Tensor, kv: KVView, tables: Tensor, plan: RowPlan, scale: float, out: Tensor) -> None:
    k, v = kv.k, kv.v
    num_heads, dim, num_kv_heads = q.shape[1], q.shape[2], k.shape[1]
    _check(q, kv, tables)
    num_parts = len(plan.part_item)
    partial = torch.empty(num_parts * num_heads * (dim + 2)) if plan.split else None
    loaded().quire_attend_rows(
        q.data_ptr(), out.data_ptr(), k.data_ptr(), v.data_ptr(), tables.data_ptr(), plan.items.data_ptr(),
        plan.part_item.data_ptr(), None if partial is None else partial.data_ptr(), len(plan.items), num_parts,
        num_heads, num_kv_heads, dim, q.stride(0), kv.block_size, k.stride(0), k.stride(1), tables.stride(0), scale,
        q.dtype == torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
