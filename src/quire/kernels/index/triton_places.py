"""Places of the rows of a step, for kernels of a GPU that take rows by themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.attention import AttentionMeta
from quire.kernels.triton_runtime import jit, tl


def places_of(meta: AttentionMeta, rows: int) -> Tensor:
    """Return (position, row of the block table) of each row of a step, [rows, 2] int32; -1: a row of no sequence."""
    found = meta.plans.get("places of rows")
    if not isinstance(found, Tensor):
        assert isinstance(meta.query_start, Tensor) and isinstance(meta.seq_lens, Tensor)
        found = torch.full((rows, 2), -1, dtype=torch.int32, device=meta.block_tables.device)
        _places_kernel[(len(meta.seq_lens),)](
            meta.query_start, meta.seq_lens, meta.table_rows, found, rows, BLOCK=128, num_warps=1
        )
        meta.plans["places of rows"] = found
    return found


@jit(do_not_specialize=["rows"])
def _places_kernel(query_start, seq_lens, table_rows, places, rows, BLOCK: tl.constexpr):
    """Write position and row of the block table for each row of a sequence. Grid (sequences,).

    places   [rows, 2] int32, output. A rehearsal finds sequences of a larger step: their further rows are left out
    """
    s = tl.program_id(0)
    first, last = tl.load(query_start + s), tl.load(query_start + s + 1)
    past, table = tl.load(seq_lens + s) - (last - first), s
    if table_rows is not None:
        table = tl.load(table_rows + s)
    last = tl.minimum(last, rows)
    for start in range(first, last, BLOCK):
        row = start + tl.arange(0, BLOCK)
        tl.store(places + 2 * row, past + row - first, mask=row < last)
        tl.store(places + 2 * row + 1, tl.zeros_like(row) + table, mask=row < last)
