"""Copies of pages of an 8-bit cache as two-byte numbers, for a prefill kernel that multiplies only those.

A step's prompts read some pages of the cache. Before a layer's prefill kernel, `widen` copies their codes to a scratch,
which has its own block table. Every code is a number of bfloat16 and of float16, so the copy is exact. The scales do
not enter it: that of keys multiplies the scores and that of values the result, as in the other kernels.

The scratch is an allocation of one call. The next layer gets the same memory, because its kernels come later in the
stream. So all layers together need one scratch; `plan/cuda_memory.py` limits it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.contracts.blocks import first_seen
from quire.kernels.attention import AttentionMeta, KVView, sequences
from quire.kernels.attention.triton_plan import unspecialized
from quire.kernels.triton_runtime import tl

PAYS = 256  # readers (query rows times the query heads of a KV head) of a token, on average, from which a copy pays
CHUNK = 8192  # numbers that a program copies


@dataclass(frozen=True)
class Pages:
    """Pages of the cache that the prompts of a step read, and where they lie in the scratch.

    pages   [P, 2] int32: sequence of the step, and number of the page in its context; in the order of the scratch
    table   [S, pages of the longest context] int32: block table of the scratch, which `widen` writes for the prompts
    """

    pages: Tensor
    table: Tensor


def find_pages(meta: AttentionMeta, size: int, window: int | None, group: int, most: int) -> Pages | None:
    """Return the pages that the prompts of a step read; `meta.plans` keeps them for other layers.

    size, window   tokens of a block; window of `paged_attention`
    group          query heads of a KV head
    most           pages that the scratch may have

    Return None if `most` pages are too few, if the prompts have too few rows for so many pages (see PAYS), or if the
    host does not know the prompts (in a CUDA graph).
    """
    key = "pages", size, window, most
    if key not in meta.plans:
        meta.plans[key] = _find(meta, size, window, group, most)
    found = meta.plans[key]
    assert found is None or isinstance(found, Pages)
    return found


def _find(meta: AttentionMeta, size: int, window: int | None, group: int, most: int) -> Pages | None:
    spans, readers = list[tuple[int, int, int]](), 0
    for first, last, sequence, past in sequences(meta) if meta.prompts is None else meta.prompts:
        rows = last - first
        if rows > meta.decode_len:
            begin = first_seen(past, window) // size
            spans.append((sequence, begin, -(-(past + rows) // size)))
            seen = past + rows // 2  # tokens that a row sees, on average
            readers += group * rows * (seen if window is None else min(seen, abs(window)))
    count = sum(end - begin for _, begin, end in spans)
    if not spans or count > most or readers < PAYS * count * size:
        return None
    pages = np.concatenate(
        [np.stack(np.broadcast_arrays(sequence, np.arange(begin, end)), 1) for sequence, begin, end in spans]
    ).astype(np.int32)
    width = -(-max(end for *_, end in spans) // 16) * 16  # kernels are compiled for a multiple of 16
    on_host, device = torch.from_numpy(pages), meta.block_tables.device
    on_host = on_host.pin_memory() if device.type == "cuda" else on_host
    table = torch.empty((len(meta.seq_lens), width), dtype=torch.int32, device=device)
    return Pages(on_host.to(device, non_blocking=True), table)


def widen(kv: KVView, found: Pages, meta: AttentionMeta, dtype: torch.dtype) -> KVView:
    """Copy the codes of pages to a new scratch of type `dtype`; return its view, with the scales of `kv`.

    Row s of `found.table`, which is written too, is the block table of the step's sequence s.
    """
    _, kv_heads, size, dim = kv.k.shape
    length = kv_heads * size * dim
    assert kv.k.stride()[1:] == kv.v.stride()[1:] == (size * dim, dim, 1) and kv.k.stride(0) == kv.v.stride(0)
    count, table = len(found.pages), found.table
    k, v = torch.empty((2, count, kv_heads, size, dim), dtype=dtype, device=kv.k.device)
    _widen_kernel[(count, -(-length // CHUNK))](
        kv.k,
        kv.v,
        k,
        v,
        found.pages,
        meta.block_tables,
        meta.table_rows,
        table,
        kv.k.stride(0),
        meta.block_tables.stride(0),
        table.stride(0),
        LENGTH=length,
        CHUNK=CHUNK,
        num_warps=4,
    )
    return KVView(k, v, kv.k_scale, kv.v_scale)


@unspecialized("stride_own")
def _widen_kernel(
    k,
    v,
    to_k,
    to_v,
    pages,
    table,
    table_rows,
    own,
    stride_block,
    stride_table,
    stride_own,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Copy a chunk of a page's keys and values. Grid (pages, chunks of a page).

    k, v            cache: LENGTH contiguous codes in each block; stride_block  elements from block to block
    to_k, to_v      [P, LENGTH] scratch, outputs
    pages           [P, 2] int32, see `Pages`
    table           [slots or sequences, blocks] int32, block tables; stride_table  elements from row to row
    table_rows      [S] int32, of `AttentionMeta`; may be None
    own             block table of the scratch, output; stride_own  elements from row to row
    """
    page, chunk = tl.program_id(0), tl.program_id(1)
    sequence, number = tl.load(pages + 2 * page), tl.load(pages + 2 * page + 1)
    if chunk == 0:
        tl.store(own + sequence.to(tl.int64) * stride_own + number, page)
    row = sequence
    if table_rows is not None:
        row = tl.load(table_rows + sequence)
    block = tl.load(table + row.to(tl.int64) * stride_table + number).to(tl.int64)
    lanes = chunk * CHUNK + tl.arange(0, CHUNK)
    inside, target = lanes < LENGTH, page.to(tl.int64) * LENGTH + lanes
    source = tl.max_contiguous(block * stride_block + lanes, 8)  # a thread loads what it stores: 8 numbers at a time
    keys = tl.load(k + source, mask=inside)
    values = tl.load(v + source, mask=inside)
    tl.store(to_k + target, keys.to(to_k.dtype.element_ty), mask=inside)
    tl.store(to_v + target, values.to(to_v.dtype.element_ty), mask=inside)
