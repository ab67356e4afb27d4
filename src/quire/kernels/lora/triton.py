"""Products of adapters in two launches for any mixture of adapters and ranks.

    shrink   a program takes a tile of rows of one adapter, a module, and a part of K
    expand   a program takes pairs of a tile and a block of outputs in turn, and fetches B of the next pair meanwhile

The parts of K are added up in their order: by the program of shrink that ends last, or, where they are few numbers, by
expand. Tiles come from a table that the step writes, so grids depend on sizes alone. Ranks beyond those of the slot's
adapter, rounded up to 8, do not count. Sums are float32; they are rounded to the dtype of B before the second product,
as B was.

With programmatic dependent launch both kernels read the tables and their first matrix before the kernel before them has
ended (`AdapterRows.early`), and the product of the layer, which is launched between them, does so with its weight.

Floor: the matrices of each adapter of the step are read once. Llama-3.1-8B, rank 16: 84 MB in bfloat16, 19 us at
4.3 TB/s, beside two launches for each of 128 layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.lora import TILE, AdapterRows, AdapterWeights
from quire.kernels.triton_runtime import jit, tl

RESIDENT = 396  # programs of expand: 3 on each of 132 multiprocessors
WANTED = 128  # programs of shrink, where all rows have one adapter
MOST_PARTS = 16
SUMMED = 4 << 20  # bytes of parts that expand reads at most
COUNTERS = 4096  # of a layer: tiles times blocks of ranks whose parts shrink adds up
WARPS = 4


class Tiling(NamedTuple):
    """The work of a program.

    parts     of K
    deep      numbers of K that shrink multiplies at once
    joined    True: shrink adds up the parts; False: expand does
    outputs   of a block of expand
    """

    parts: int
    deep: int
    joined: bool
    outputs: int


def tiling(weights: AdapterWeights, rows: AdapterRows, count: int) -> Tiling:
    """Return the tiling for `count` rows. It depends on sizes alone, as a captured step needs it."""
    modules, rank, width = weights.a.shape[-3:]
    tiles, size = max(1, -(-count // rows.tile)), max(16, _power(rank))
    blocks = modules * -(-rank // 64)
    deep = min(256 if rank <= 32 else 128, max(16 * WARPS, _power(width)))
    parts = max(1, min(MOST_PARTS, width // (2 * deep), -(-WANTED // (tiles * blocks))))
    parts = 1 << (parts.bit_length() - 1)  # a power of two, so that few kernels are compiled
    many = rows.tile == TILE and weights.num_outputs * tiles > 1 << 16
    outputs = min(256 if many and size <= 32 else 128, 8192 // size, max(16, _power(weights.most_outputs)))
    read = 4 * parts * count * rank * -(-weights.num_outputs // outputs)
    joined = parts > 1 and (read > SUMMED or rank > 64) and len(rows.tiles) * blocks <= COUNTERS
    return Tiling(parts, deep, joined, outputs)


def shrink(x: Tensor, weights: AdapterWeights, rows: AdapterRows, first: int = 0, walk: Tiling | None = None) -> Tensor:
    """Return the products A x, [parts, T, modules, R] float32, a row for each index of `rows.order`.

    If shrink adds up the parts, the result has one, in the dtype of B. walk: tiling to use; None: `tiling` chooses it
    """
    (_, modules, rank, width), count = weights.a.shape, len(x)
    walk = walk or tiling(weights, rows, count)
    sums = torch.empty(walk.parts, len(rows.order), modules, rank, dtype=torch.float32, device=x.device)
    inner = torch.empty_like(sums[:1], dtype=weights.b.dtype) if walk.joined else sums
    if not len(rows.tiles):
        return inner
    block, in_pdl = min(64, max(16, _power(rank))), pdl.in_use()
    _shrink_kernel[(modules * -(-rank // block), len(rows.tiles), walk.parts)](
        x,
        weights.a,
        weights.ranks,
        rows.order,
        rows.tiles,
        sums,
        inner if walk.joined else None,
        _counters(weights, x.device) if walk.joined else None,
        first,
        count,
        width,
        -(-width // walk.parts),
        len(rows.order),
        modules,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        *weights.a.stride(),
        rank,
        block,
        walk.deep,
        WARPS if rows.tile == TILE else 1,
        rows.tile,
        walk.parts if walk.joined else 1,
        rows.early,
        in_pdl,
        num_warps=WARPS,
        **pdl.options(in_pdl),
    )
    return inner


def expand(
    y: Tensor,
    inner: Tensor,
    weights: AdapterWeights,
    rows: AdapterRows,
    first: int = 0,
    walk: Tiling | None = None,
) -> None:
    """Add the products B of inner to y in place. See `quire.kernels.lora`; walk as for `shrink`."""
    if not len(rows.tiles):
        return
    parts, held, modules, rank = inner.shape
    walk = walk or tiling(weights, rows, len(y))
    (table, align), in_pdl = _blocks(weights, walk.outputs, y.device), pdl.in_use()
    _expand_kernel[(min(RESIDENT, len(table) * len(rows.tiles)),)](
        y,
        inner,
        weights.b,
        weights.ranks,
        rows.order,
        rows.tiles,
        rows.used,
        table,
        first,
        len(y),
        held,
        modules,
        len(table),
        len(rows.tiles),
        y.stride(0),
        *weights.b.stride(),
        rank,
        max(16, _power(rank)),
        walk.outputs,
        rows.tile,
        parts,
        align,
        rows.early,
        in_pdl,
        num_warps=WARPS if rank <= 128 else 2 * WARPS,
        num_stages=1,
        **pdl.options(in_pdl),
    )


def _power(count: int) -> int:
    """Return `count` rounded up to a power of two."""
    return 1 << (count - 1).bit_length()


def _counters(weights: AdapterWeights, device: torch.device) -> Tensor:
    """Return [COUNTERS] int32 zeros, which kernels leave as zeros. They are a layer's own."""
    if 0 not in weights.tables:
        weights.tables[0] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    return weights.tables[0]


def _blocks(weights: AdapterWeights, size: int, device: torch.device) -> tuple[Tensor, int]:
    """Return blocks of outputs within a run, and the alignment by which their numbers are divided.

    [blocks, 4] int32: module, first output, outputs, and first row of B; the last three divided by the alignment
    """
    align = 16 if all((run.first | run.rows | run.row) % 16 == 0 for run in weights.runs) else 1
    if size not in weights.tables:
        found = [
            (run.module, (run.first + at) // align, min(size, run.rows - at) // align, (run.row + at) // align)
            for run in weights.runs
            for at in range(0, run.rows, size)
        ]
        weights.tables[size] = torch.tensor(found, dtype=torch.int32).to(device)
    return weights.tables[size], align


@jit(do_not_specialize=["first", "count", "held", "modules"])
def _shrink_kernel(
    x,
    a,
    ranks,
    order,
    tiles,
    sums,
    inner,
    counters,
    first,
    count,
    width,
    step,
    held,
    modules,
    x_row,
    x_module,
    a_slot,
    a_module,
    a_rank,
    a_width,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEEP: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    JOINED: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (modules * blocks of ranks, tiles, parts). Shapes as in `quire.kernels.lora`; strides are in numbers.

    count, held       rows of x, and of `sums`;  step  numbers of K of a part
    sums              [parts, held, modules, RANK] float32
    inner, counters   [held, modules, RANK]; [tiles * blocks of ranks] int32 zeros;  None: expand adds up the parts
    DEEP, SPLIT       numbers of K of an iteration; parts of these, which warps multiply side by side
    JOINED            parts that are added up here; 1: none
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not EARLY:
            tl.extra.cuda.gdc_wait()
    tile = tiles + tl.program_id(1) * 3
    slot, at, rows = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    own = tl.load(ranks + tl.where(rows > 0, slot, 0))
    module = tl.program_id(0) % modules
    lowest = tl.program_id(0) // modules * BLOCK_R
    lane = tl.arange(0, TILE)
    row = tl.load(order + at + lane, mask=lane < rows, other=-1) - first
    begin = tl.program_id(2) * step
    end = tl.minimum(begin + step, width)
    if SPLIT == 1:
        wide, deep = tl.arange(0, DEEP)[None, :], tl.arange(0, DEEP)[:, None]
        acc = tl.zeros([TILE, BLOCK_R], tl.float32)
    else:
        part = tl.arange(0, SPLIT)[:, None, None] * (DEEP // SPLIT)
        wide = part + tl.arange(0, DEEP // SPLIT)[None, None, :]
        deep = part + tl.arange(0, DEEP // SPLIT)[None, :, None]
        acc = tl.zeros([SPLIT, TILE, BLOCK_R], tl.float32)
    rank = lowest + tl.arange(0, BLOCK_R)
    of_a = a + slot.to(tl.int64) * a_slot + module.to(tl.int64) * a_module
    known = (rank < own) & (rows > 0)
    here = (lane < rows) & (row >= 0) & (row < count)
    of_ranks, of_rows = rank.to(tl.int64) * a_rank, row.to(tl.int64) * x_row
    if SPLIT == 1:
        known, here, of_ranks, of_rows = known[None, :], here[:, None], of_ranks[None, :], of_rows[:, None]
    else:
        known, here = known[None, None, :], here[None, :, None]
        of_ranks, of_rows = of_ranks[None, None, :], of_rows[None, :, None]
    of_a += of_ranks
    col = begin + deep
    next_right = tl.load(of_a + col.to(tl.int64) * a_width, mask=known & (col < end), other=0.0)
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_wait()
    if (rows == 0) | (own <= lowest):
        return
    xs = x + of_rows + module.to(tl.int64) * x_module + wide
    for k in range(begin, end, DEEP):
        left = tl.load(xs + k, mask=here & (k + wide < end), other=0.0)
        right, col = next_right, k + DEEP + deep
        next_right = tl.load(of_a + col.to(tl.int64) * a_width, mask=known & (col < end), other=0.0)
        acc = tl.dot(left.to(right.dtype), right, acc, input_precision="ieee")
    result = acc
    if SPLIT > 1:
        result = tl.sum(acc, 0)
    inside = (lane < rows)[:, None] & (rank < RANK)[None, :]
    place = ((at + lane)[:, None] * modules + module).to(tl.int64) * RANK + rank[None, :]
    each = held.to(tl.int64) * modules * RANK
    tl.store(sums + tl.program_id(2) * each + place, result, mask=inside)
    if JOINED > 1:
        counter = counters + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.debug_barrier()  # all of the part is written before it is counted
        if tl.atomic_add(counter, 1, sem="acq_rel") == JOINED - 1:
            tl.store(counter, 0)
            result = tl.zeros([TILE, BLOCK_R], tl.float32)
            for number in tl.static_range(JOINED):
                result += tl.load(sums + number * each + place, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(inner + place, result.to(inner.dtype.element_ty), mask=inside)


@jit
def _fetch(
    item,
    total,
    b,
    ranks,
    order,
    tiles,
    blocks,
    num_blocks,
    b_slot,
    b_row,
    b_rank,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Return all of a pair that no kernel of the step writes. The rank is 0 for a tile that changes nothing.

    first index in `order`, ranks, rows of `order` [TILE], module, first output and outputs in units of ALIGN, and B
    [BLOCK_R, BLOCK_N]
    """
    there = item < total
    tile = tiles + item // num_blocks * 3
    slot, at = tl.load(tile, mask=there, other=0), tl.load(tile + 1, mask=there, other=0)
    rows = tl.load(tile + 2, mask=there, other=0)
    block = blocks + item % num_blocks * 4
    module, col = tl.load(block), tl.load(block + 1)
    outputs, of_b = tl.load(block + 2), tl.load(block + 3) * ALIGN
    own = tl.where(rows > 0, tl.load(ranks + tl.where(rows > 0, slot, 0)), 0)
    lane, rank, n = tl.arange(0, TILE), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_N)
    row = tl.load(order + at + lane, mask=lane < rows, other=-1)
    from_ = b + slot.to(tl.int64) * b_slot
    from_ += (of_b + n)[None, :].to(tl.int64) * b_row + rank[:, None].to(tl.int64) * b_rank
    whole = (own + 7) // 8 * 8  # so that 8 numbers are read at once
    right = tl.load(from_, mask=(rank < whole)[:, None] & (n < outputs * ALIGN)[None, :], other=0.0)
    return at, own, row, module, col, outputs, right


@jit(do_not_specialize=["first", "count", "held", "modules", "num_blocks", "num_tiles"])
def _expand_kernel(
    y,
    inner,
    b,
    ranks,
    order,
    tiles,
    used,
    blocks,
    first,
    count,
    held,
    modules,
    num_blocks,
    num_tiles,
    y_row,
    b_slot,
    b_row,
    b_rank,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs take pairs of a tile and a block of outputs in turn. blocks: of `_blocks`;  used: see `AdapterRows`"""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not EARLY:
            tl.extra.cuda.gdc_wait()
    total = num_tiles * num_blocks
    if used is not None:
        total = tl.load(used) * num_blocks
    begin = tl.program_id(0)
    at, own, row, module, col, outputs, right = _fetch(
        begin, total, b, ranks, order, tiles, blocks, num_blocks, b_slot, b_row, b_rank, BLOCK_R, BLOCK_N, TILE, ALIGN
    )
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_wait()
    lane, rank, n = tl.arange(0, TILE), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_N)
    for item in range(begin, total, tl.num_programs(0)):
        own_row = row - first
        here = (row >= 0) & (own_row >= 0) & (own_row < count) & (own > 0)
        to = y + own_row[:, None].to(tl.int64) * y_row + (col * ALIGN + n)[None, :]
        inside = here[:, None] & (n < outputs * ALIGN)[None, :]
        made = tl.load(to, mask=inside, other=0.0).to(tl.float32)
        sums = tl.zeros([TILE, BLOCK_R], tl.float32)
        from_ = inner + ((at + lane)[:, None] * modules + module).to(tl.int64) * RANK + rank[None, :]
        read = here[:, None] & (rank < (own + 7) // 8 * 8)[None, :]
        for part in tl.static_range(PARTS):
            sums += tl.load(from_ + part * held.to(tl.int64) * modules * RANK, mask=read, other=0.0).to(tl.float32)
        left, right_now = sums.to(right.dtype), tl.where((rank < own)[:, None], right, 0.0)
        following = item + tl.num_programs(0)
        if following < total:  # B of the next pair is on its way beside the product
            at, own, row, module, col, outputs, right = _fetch(
                following, total, b, ranks, order, tiles, blocks, num_blocks, b_slot, b_row, b_rank, BLOCK_R, BLOCK_N,
                TILE, ALIGN,
            )  # fmt: skip
        made += tl.dot(left, right_now, input_precision="ieee")
        tl.store(to, made.to(y.dtype.element_ty), mask=inside)
