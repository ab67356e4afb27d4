"""Paged attention in C.

Rows of decodes and of short chunks read the context in place, one by one (native.c). Longer chunks of prompts use AMX
tiles (native_chunks.c), or vectors in float32, without AMX or with `row_positions` (native_prompts.c).
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta, KVView, as_list
from quire.kernels.attention.cpu import write_kv
from quire.kernels.attention.cpu_plan import ChunkPlan, plan_chunk
from quire.kernels.native import memory
from quire.kernels.native.library import loaded, missing_amx

__all__ = ["paged_attention", "write_kv"]

PART, MAX_DIM = 512, 512  # of native.c
STEP, ROWS, WIDEST = 32, 32, 256  # of native_chunks.c
NO_TILES = missing_amx()
SCRATCH = 256 << 20  # bytes for the keys and values of chunks in the order of tiles
FEW = 4  # up to so many query rows of a sequence are computed one by one
MOST_PARTS = 8192  # parts of all rows in a call (or of one row alone): 136 MB with 32 heads of 128
NONE_BAD = 1 << 62


@dataclass(frozen=True)
class RowPlan:
    """Arguments of a call of the C kernel that computes query rows one by one.

    items       [R, 4] int64, a record for each row; native.c describes it
    part_item   [P] int32: index in `items` of the row to which each of the P parts of contexts belongs
    split       True: the context of some row is read in several parts
    """

    items: Tensor
    part_item: Tensor
    split: bool


@dataclass(frozen=True)
class ChunkPass:
    """Arguments of a call of the C kernel for prompt chunks whose keys and values fit into the scratch memory together.

    items   [C, 6] int64, a record for each chunk; native_chunks.c describes it
    heads   number of KV heads that are computed at a time
    size    elements of the scratch memory that the call needs
    """

    items: Tensor
    heads: int
    size: int


@dataclass
class NativePlan:
    """Calls of the C attention kernels in a step.

    rows       calls for sequences of at most FEW (4) query rows, which are computed one by one. The contexts of a call
               are read in about MOST_PARTS (8192) parts
    chunks     sequences with more query rows, which are computed together
    num_rows   query rows of the step
    prompts    [C, 4] int64, a record for each of `chunks`; native_prompts.c describes it
    passes     (KV heads, head size) -> calls that compute `chunks` with AMX
    scratch    memory for the largest call of `passes`
    partial    [floats] results of the parts of contexts, if some context has several parts. It is a NumPy array because
               tensors that PyTorch allocates during a `KernelRecording` belong to the recording, not to the step
    """

    rows: tuple[RowPlan, ...]
    chunks: tuple[ChunkPlan, ...]
    num_rows: int
    prompts: Tensor
    positions: Tensor | None = None
    passes: dict[tuple[int, int], list[ChunkPass]] = field(default_factory=dict)
    scratch: Tensor | None = None
    partial: np.ndarray | None = None


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
    plan = _plan(meta, kv.block_size)
    if plan.num_rows > len(q):
        raise ValueError(
            f"native attention: q must have a row for each of the step's {plan.num_rows} tokens; it has {len(q)} rows"
        )
    out = q.new_empty(q.shape)
    for rows in plan.rows:
        _attend_rows(q, kv, meta.block_tables, plan, rows, scale, out)
    tiles = q.dtype == torch.bfloat16 and q.shape[2] <= WIDEST and not NO_TILES and plan.positions is None
    if plan.chunks and tiles:
        _attend_chunks(q, kv, meta.block_tables, plan, scale, out)
    elif plan.chunks:
        _attend_prompts(q, kv, meta.block_tables, plan, scale, out)
    return out


def rows_only(meta: AttentionMeta, block_size: int) -> bool:
    """Return True if a `KernelRecording` can hold the attention of the step.

    It can if no sequence has more than FEW (4) query rows and one call of the C kernel computes all rows.
    """
    plan = _plan(meta, block_size)
    return len(plan.rows) == 1 and not plan.chunks


def retarget(recording: int, meta: AttentionMeta, block_size: int, num_heads: int, head_dim: int) -> None:
    """Make recorded attention calls read the block tables and lengths of another step.

    recording   `KernelRecording.address` of the recording with these calls
    meta        metadata of the other step, for which `rows_only` is true; it must live until after the replay.
                See `quire.kernels.attention`
    """
    plan, tables = _plan(meta, block_size), meta.block_tables
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
        _partial(plan, rows, num_heads, head_dim),
        len(rows.items),
        len(rows.part_item),
        tables.stride(0),
    )


def _plan(meta: AttentionMeta, block_size: int) -> NativePlan:
    plan = meta.plans.get(block_size)
    if not isinstance(plan, NativePlan):
        plan = meta.plans[block_size] = _make_plan(meta, block_size)
    return plan


def _make_plan(meta: AttentionMeta, block_size: int) -> NativePlan:
    starts, lengths = as_list(meta.query_start), as_list(meta.seq_lens)
    tables = meta.block_tables.shape
    if len(lengths) > tables[0] or max(lengths, default=0) > tables[1] * block_size:
        raise ValueError(
            f"native attention: block tables {tuple(tables)}, with {block_size} tokens per block, are too "
            f"small for the contexts {lengths}: give each sequence ceil(length / {block_size}) blocks"
        )
    positions = None if meta.row_positions is None else meta.row_positions.long().contiguous()
    rows: list[tuple[int, int, int]] = []  # row, tokens it sees, sequence
    chunks = []
    for s, length in enumerate(lengths):
        first, last = starts[s], starts[s + 1]
        if last - first > FEW:
            chunks.append(plan_chunk(meta, s, first, last, length, block_size))
        elif positions is None:
            rows += [(row, length - last + row + 1, s) for row in range(first, last)]
        else:
            rows += [(row, position + 1, s) for row, position in enumerate(positions[first:last].tolist(), first)]
    prompts = [(chunk.first, chunk.last - chunk.first, chunk.total, chunk.sequence) for chunk in chunks]
    return NativePlan(
        _plan_rows(rows) if rows else (), tuple(chunks), starts[-1], torch.tensor(prompts, dtype=torch.int64), positions
    )


def _plan_rows(rows: list[tuple[int, int, int]]) -> tuple[RowPlan, ...]:
    items = np.empty((len(rows), 4), np.int64)
    items[:, :3] = rows
    calls = np.cumsum(-(-items[:, 1] // PART)) // MOST_PARTS
    return tuple(_row_plan(some) for some in np.split(items, np.flatnonzero(np.diff(calls)) + 1))


def _row_plan(items: np.ndarray) -> RowPlan:
    parts = -(-items[:, 1] // PART)
    items[:, 3] = np.cumsum(parts) - parts
    part_item = np.repeat(np.arange(len(items), dtype=np.int32), parts)
    return RowPlan(torch.from_numpy(items), torch.from_numpy(part_item), len(part_item) > len(items))


def _attend_prompts(q: Tensor, kv: KVView, tables: Tensor, plan: NativePlan, scale: float, out: Tensor) -> None:
    k = kv.k
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
        len(plan.prompts),
        num_heads,
        k.shape[1],
        dim,
        q.stride(0),
        kv.block_size,
        k.stride(0),
        k.stride(1),
        tables.stride(0),
        scale,
        q.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )


def _attend_chunks(q: Tensor, kv: KVView, tables: Tensor, plan: NativePlan, scale: float, out: Tensor) -> None:
    k = kv.k
    num_heads, dim, num_kv_heads = q.shape[1], q.shape[2], k.shape[1]
    _check(q, kv, tables)
    passes = plan.passes.get((num_kv_heads, dim))
    if passes is None:
        passes = plan.passes[num_kv_heads, dim] = _chunk_passes(plan.chunks, num_kv_heads, dim)
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
                scale,
                torch.get_num_threads(),
            )
        if int(one.items[:, 5].min()) < NONE_BAD:
            _attend_again(q, kv, tables, plan, one, scale, out)


def _attend_again(
    q: Tensor, kv: KVView, tables: Tensor, plan: NativePlan, one: ChunkPass, scale: float, out: Tensor
) -> None:
    """Compute again the rows shortly before a value that is not finite.

    Their task may have read the value: it reads up to ROWS - 1 tokens past a row. Rows that see the value are not
    finite either way.
    """
    rows: list[tuple[int, int, int]] = []
    for first, num_rows, length, table, _, group in one.items.tolist():
        past = length - num_rows
        near = range(max(past, group * STEP - ROWS + 1), min(length, (group + 1) * STEP))
        rows += [(first + position - past, position + 1, table) for position in near]
    one.items[:, 5] = NONE_BAD
    for few in _plan_rows(rows) if rows else ():
        _attend_rows(q, kv, tables, plan, few, scale, out)


def _chunk_passes(chunks: tuple[ChunkPlan, ...], num_kv_heads: int, dim: int) -> list[ChunkPass]:
    """Group chunks into passes that fit into SCRATCH. A chunk too long for that takes fewer KV heads at a time."""
    groups: list[list[ChunkPlan]] = []
    used = 0
    for chunk in chunks:
        size = _head_elements(chunk, dim) * num_kv_heads * torch.bfloat16.itemsize
        if not groups or used + size > SCRATCH:
            groups.append([])
            used = 0
        groups[-1].append(chunk)
        used += size
    return [_chunk_pass(group, num_kv_heads, dim) for group in groups]


def _chunk_pass(chunks: list[ChunkPlan], num_kv_heads: int, dim: int) -> ChunkPass:
    sizes = [_head_elements(chunk, dim) for chunk in chunks]
    heads = max(1, min(num_kv_heads, SCRATCH // torch.bfloat16.itemsize // sum(sizes)))
    items, at = [], 0
    for chunk, size in zip(chunks, sizes, strict=True):
        items.append((chunk.first, chunk.last - chunk.first, chunk.total, chunk.sequence, at, NONE_BAD))
        at += size * heads
    return ChunkPass(torch.tensor(items, dtype=torch.int64), heads, at)


def _head_elements(chunk: ChunkPlan, dim: int) -> int:
    """Return the elements of scratch that a KV head of a chunk takes."""
    return 2 * (-(-chunk.total // STEP) * STEP) * (-(-dim // STEP) * STEP)


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


def _attend_rows(
    q: Tensor, kv: KVView, tables: Tensor, plan: NativePlan, rows: RowPlan, scale: float, out: Tensor
) -> None:
    k, v = kv.k, kv.v
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
        _partial(plan, rows, num_heads, dim),
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
        scale,
        q.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )


def _partial(plan: NativePlan, rows: RowPlan, num_heads: int, dim: int) -> int | None:
    """Return the address of memory for the results of parts: sums, maximum and total of every query head. None: not
    needed."""
    if not rows.split:
        return None
    size = len(rows.part_item) * num_heads * (dim + 2)
    if plan.partial is None or len(plan.partial) < size:
        plan.partial = np.empty(size, np.float32)
    return plan.partial.ctypes.data
