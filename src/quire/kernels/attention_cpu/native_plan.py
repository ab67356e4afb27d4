"""The plan of a step's attention in C: arguments of the calls, made once per step and used by every layer.

No keys, no values: the plan depends on lengths alone.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from quire.contracts.blocks import all_first_seen, first_seen
from quire.kernels.attention import AttentionMeta, as_list
from quire.kernels.attention_cpu.plan import ChunkPlan, plan_chunk

PART = 512  # of rows.c
STEP = 32  # of chunks.c
SCRATCH = 256 << 20  # bytes for the keys and values of chunks in the order of tiles
FEW = 4  # up to so many query rows of a sequence are computed one by one
MOST_PARTS = 8192  # parts of all rows in a call (or of one row alone): 136 MB with 32 heads of 128
NONE_BAD = 1 << 62


@dataclass(frozen=True)
class RowPlan:
    """Arguments of a call of the C kernel that computes query rows one by one.

    items       [R, 5] int64, a record for each row; rows.c describes it
    part_item   [P] int32: index in `items` of the row to which each of the P parts of contexts belongs
    split       True: the context of some row is read in several parts
    """

    items: Tensor
    part_item: Tensor
    split: bool


@dataclass(frozen=True)
class ChunkPass:
    """Arguments of a call of the C kernel for prompt chunks whose keys and values fit into the scratch memory together.

    items   [C, 7] int64, a record for each chunk; chunks.c describes it
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
    prompts    [C, 4] int64, a record for each of `chunks`; prompts.c describes it
    passes     (KV heads, head size) -> calls that compute `chunks` with AMX
    scratch    memory for the largest call of `passes`
    partial    [floats] results of the parts of contexts, if some context has several parts. It is a NumPy array because
               tensors that PyTorch allocates during a `KernelRecording` belong to the recording, not to the step
    window     that of `paged_attention`
    """

    rows: tuple[RowPlan, ...]
    chunks: tuple[ChunkPlan, ...]
    num_rows: int
    prompts: Tensor
    positions: Tensor | None = None
    passes: dict[tuple[int, int], list[ChunkPass]] = field(default_factory=dict)
    scratch: Tensor | None = None
    partial: np.ndarray | None = None
    window: int | None = None


def plan_native(meta: AttentionMeta, block_size: int, window: int | None = None, few: float = FEW) -> NativePlan:
    """Return the plan of a step. `meta.plans` keeps it, so that all layers with this window share it.

    few   up to so many query rows of a sequence are computed one by one
    """
    plan = meta.plans.get((block_size, window, few))
    if not isinstance(plan, NativePlan):
        plan = meta.plans[block_size, window, few] = _make_plan(meta, block_size, window, few)
    return plan


def _make_plan(meta: AttentionMeta, block_size: int, window: int | None, few: float) -> NativePlan:
    if window == 0:
        raise ValueError(f"native attention: a window of {window} tokens is too small: a row attends to itself")
    starts, lengths = as_list(meta.query_start), as_list(meta.seq_lens)
    tables = meta.block_tables.shape
    if len(lengths) > tables[0] or max(lengths, default=0) > tables[1] * block_size:
        raise ValueError(
            f"native attention: block tables {tuple(tables)}, with {block_size} tokens per block, are too "
            f"small for the contexts {lengths}: give each sequence ceil(length / {block_size}) blocks"
        )
    positions = None if meta.row_positions is None else meta.row_positions.long().contiguous()
    rows: list[tuple[int, int, int]] = []  # row, end of the tokens it sees, sequence
    chunks = []
    for s, length in enumerate(lengths):
        first, last = starts[s], starts[s + 1]
        if last - first > few:
            chunks.append(plan_chunk(meta, s, first, last, length, block_size))
        elif positions is None:
            rows += [(row, length - last + row + 1, s) for row in range(first, last)]
        else:
            rows += [(row, position + 1, s) for row, position in enumerate(positions[first:last].tolist(), first)]
    prompts = [(chunk.first, chunk.last - chunk.first, chunk.total, chunk.sequence) for chunk in chunks]
    return NativePlan(
        plan_rows(rows, window) if rows else (),
        tuple(chunks),
        starts[-1],
        torch.tensor(prompts, dtype=torch.int64),
        positions,
        window=window,
    )


def plan_rows(rows: list[tuple[int, int, int]], window: int | None) -> tuple[RowPlan, ...]:
    """Return the calls that compute these rows one by one.

    rows     (row of q, end of the tokens it sees, sequence) of each row
    window   that of `paged_attention`
    """
    items = np.empty((len(rows), 5), np.int64)
    items[:, :3] = rows
    items[:, 4] = 0 if window is None else all_first_seen(items[:, 1] - 1, window)
    calls = np.cumsum(_num_parts(items)) // MOST_PARTS
    return tuple(_row_plan(some) for some in np.split(items, np.flatnonzero(np.diff(calls)) + 1))


def _num_parts(items: np.ndarray) -> np.ndarray:
    """Return the number of parts in which each row reads its context. Parts start at the first token it sees."""
    return -(-(items[:, 1] - items[:, 4]) // PART)


def _row_plan(items: np.ndarray) -> RowPlan:
    parts = _num_parts(items)
    items[:, 3] = np.cumsum(parts) - parts
    part_item = np.repeat(np.arange(len(items), dtype=np.int32), parts)
    return RowPlan(torch.from_numpy(items), torch.from_numpy(part_item), len(part_item) > len(items))


def chunk_passes(
    chunks: tuple[ChunkPlan, ...], num_kv_heads: int, dim: int, window: int | None = None
) -> list[ChunkPass]:
    """Group chunks into passes that fit into SCRATCH. A chunk too long for that takes fewer KV heads at a time."""
    groups: list[list[ChunkPlan]] = []
    used = 0
    for chunk in chunks:
        size = _head_elements(chunk, dim, window) * num_kv_heads * torch.bfloat16.itemsize
        if not groups or used + size > SCRATCH:
            groups.append([])
            used = 0
        groups[-1].append(chunk)
        used += size
    return [_chunk_pass(group, num_kv_heads, dim, window) for group in groups]


def _chunk_pass(chunks: list[ChunkPlan], num_kv_heads: int, dim: int, window: int | None) -> ChunkPass:
    sizes = [_head_elements(chunk, dim, window) for chunk in chunks]
    heads = max(1, min(num_kv_heads, SCRATCH // torch.bfloat16.itemsize // sum(sizes)))
    items, at = [], 0
    for chunk, size in zip(chunks, sizes, strict=True):
        start = _first_token(chunk, window)
        items.append((chunk.first, chunk.last - chunk.first, chunk.total, chunk.sequence, at, NONE_BAD, start))
        at += size * heads
    return ChunkPass(torch.tensor(items, dtype=torch.int64), heads, at)


def _first_token(chunk: ChunkPlan, window: int | None) -> int:
    """Return the first token of the context that a row of a chunk sees: its first row sees it."""
    return first_seen(chunk.past, window)


def _head_elements(chunk: ChunkPlan, dim: int, window: int | None) -> int:
    """Return the elements of scratch that a KV head of a chunk takes."""
    groups = -(-chunk.total // STEP) - _first_token(chunk, window) // STEP
    return 2 * groups * STEP * (-(-dim // STEP) * STEP)


def partial_of(plan: NativePlan, rows: RowPlan, num_heads: int, dim: int) -> int | None:
    """Return the address of memory for the results of parts: sums, maximum and total of every query head. None: not
    needed."""
    if not rows.split:
        return None
    size = len(rows.part_item) * num_heads * (dim + 2)
    if plan.partial is None or len(plan.partial) < size:
        plan.partial = np.empty(size, np.float32)
    return plan.partial.ctypes.data
