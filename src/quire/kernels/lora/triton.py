"""Products of adapters in two launches for any mixture of adapters and ranks.

    shrink   a program takes a tile of rows of one adapter, a module, and a part of K
    expand   a program takes a tile and a block of outputs; it adds up the parts of K, always in the same order

Tiles come from a table that the step writes, so grids depend on sizes alone, and a program without a tile ends at once.
Ranks beyond those of the slot's adapter are not read. The sums of the parts are float32; they are rounded to the dtype
of B before the second product, as B was.

Floor: the matrices of each adapter of the step are read once. Llama-3.1-8B, rank 16: 84 MB in bfloat16, 19 us at
4.3 TB/s, beside two launches for each of 128 layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.lora import TILE, AdapterRows, AdapterWeights
from quire.kernels.lora.pairs import pair_rows as pair_rows
from quire.kernels.triton_runtime import jit, tl

PROGRAMS = 264  # that keep a GPU of 132 multiprocessors busy
PART = 256  # numbers of K that a program takes at least
OUTPUTS = 128  # of a block at most
MOST_PARTS = 16
RANKS = 64  # of B that a program holds at a time


def shrink(
    x: Tensor, weights: AdapterWeights, rows: AdapterRows, first: int = 0, scales: Tensor | None = None
) -> Tensor:
    """Return the products A x, [parts, T, modules, R] float32, a row for each index of `rows.order`.

    Of pairs (`rows.top_k`) x has a row for each pair, or one for each token. scales: [T, k] factors of the pairs
    """
    modules, rank, width = weights.a.shape[-3:]
    count = len(rows.order) if rows.top_k else len(x)
    tokens = max(1, count // max(1, len(x)))  # pairs of a row of x
    block = max(16, 1 << (rank - 1).bit_length())
    blocks = modules * -(-block // 64)
    most = MOST_PARTS if rank <= RANKS else MOST_PARTS // 4  # more would not stay in registers of `expand`
    wanted = min(most, max(1, width // PART), -(-PROGRAMS // max(1, -(-count // TILE) * blocks)))
    parts = 1 << (wanted.bit_length() - 1)  # a power of two, so that few kernels are compiled
    step = -(-width // parts)
    inner = torch.empty(parts, len(rows.order), modules, rank, dtype=torch.float32, device=x.device)
    if not len(rows.tiles):
        return inner
    of_module, in_pdl = x.stride(1) if x.dim() == 3 else 0, pdl.in_use()
    _shrink_kernel[(blocks, len(rows.tiles), parts)](
        x,
        weights.a,
        weights.ranks,
        rows.order,
        rows.tiles,
        scales,
        inner,
        first,
        count,
        width,
        step,
        len(rows.order),
        x.stride(0),
        of_module,
        *_strides(weights.ranks, 0),
        *_strides(weights.a, 3),
        *weights.a.stride()[-3:],
        tokens,
        _places(weights),
        modules,
        rank,
        min(block, 64),
        128 if width >= 128 else max(16, 1 << (width - 1).bit_length()),
        TILE,
        in_pdl,
        num_warps=4,
        **pdl.options(in_pdl),
    )
    return inner


def expand(y: Tensor, inner: Tensor, weights: AdapterWeights, rows: AdapterRows, first: int = 0) -> None:
    """Add the products B of inner to y in place. See `quire.kernels.lora`."""
    if not len(rows.tiles):
        return
    parts, held, modules, rank = inner.shape
    size = min(OUTPUTS, max(16, 1 << (weights.most_outputs - 1).bit_length()))
    table, in_pdl = weights.blocks(size, y.device), pdl.in_use()
    _expand_kernel[(len(table), len(rows.tiles))](
        y,
        inner,
        weights.b,
        weights.ranks,
        rows.order,
        rows.tiles,
        table,
        first,
        len(y),
        held,
        y.stride(0),
        *_strides(weights.ranks, 0),
        *_strides(weights.b, 2),
        *weights.b.stride()[-2:],
        _places(weights),
        modules,
        rank,
        min(RANKS, max(16, 1 << (rank - 1).bit_length())),
        size,
        TILE,
        parts,
        in_pdl,
        num_warps=4,
        **pdl.options(in_pdl),
    )


def _places(weights: AdapterWeights) -> int:
    """Return the experts of a layer of experts, 1 of another layer."""
    return weights.ranks.shape[1] if weights.ranks.dim() == 2 else 1


def _strides(matrices: Tensor, dims: int) -> tuple[int, int]:
    """Return the strides of slots and of experts. dims: dimensions of a slot of a layer without experts"""
    return matrices.stride(0), matrices.stride(1) if matrices.dim() > 1 + dims else 0


@jit(do_not_specialize=["first", "count", "held"])
def _shrink_kernel(
    x,
    a,
    ranks,
    order,
    tiles,
    scales,
    inner,
    first,
    count,
    width,
    step,
    held,
    x_row,
    x_module,
    r_slot,
    r_place,
    a_slot,
    a_place,
    a_module,
    a_rank,
    a_width,
    PAIRS: tl.constexpr,
    PLACES: tl.constexpr,
    MODULES: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (modules * blocks of ranks, tiles, parts). Shapes as in `quire.kernels.lora`; strides are in numbers.

    count, held   rows of the step, or pairs, and rows of `inner`;  step  numbers of K of a part
    scales        [pairs] float32 factors; None: 1
    PAIRS, PLACES   pairs that read a row of x; experts of a layer of experts: a tile's slot is slot * PLACES + place
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tiles + tl.program_id(1) * 3
    slot, at, rows = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    place = tl.where(rows > 0, slot, 0) % PLACES
    slot = tl.where(rows > 0, slot, 0) // PLACES
    own = tl.load(ranks + slot * r_slot + place * r_place)
    module = tl.program_id(0) % MODULES
    rank = tl.program_id(0) // MODULES * BLOCK_R + tl.arange(0, BLOCK_R)
    if (rows == 0) | (own <= tl.program_id(0) // MODULES * BLOCK_R):
        return
    lane = tl.arange(0, TILE)
    row = tl.load(order + at + lane, mask=lane < rows, other=-1) - first
    here = (lane < rows) & (row >= 0) & (row < count)
    begin = tl.program_id(2) * step
    end = tl.minimum(begin + step, width)
    xs = x + (row // PAIRS)[:, None].to(tl.int64) * x_row + module.to(tl.int64) * x_module
    of_a = a + slot.to(tl.int64) * a_slot + place.to(tl.int64) * a_place
    of_a += module.to(tl.int64) * a_module + rank[None, :].to(tl.int64) * a_rank
    acc = tl.zeros([TILE, BLOCK_R], tl.float32)
    for k in range(begin, end, BLOCK_K):
        col = k + tl.arange(0, BLOCK_K)
        left = tl.load(xs + col[None, :], mask=here[:, None] & (col < end)[None, :], other=0.0)
        right = tl.load(
            of_a + col[:, None].to(tl.int64) * a_width, mask=(col < end)[:, None] & (rank < own)[None, :], other=0.0
        )
        acc = tl.dot(left.to(right.dtype), right, acc, input_precision="ieee")
    if scales is not None:
        acc *= tl.load(scales + row, mask=here, other=0.0)[:, None]
    to = inner + ((tl.program_id(2) * held + at + lane)[:, None].to(tl.int64) * MODULES + module) * RANK + rank[None, :]
    tl.store(to, acc, mask=(lane < rows)[:, None] & (rank < RANK)[None, :])


@jit(do_not_specialize=["first", "count", "held"])
def _expand_kernel(
    y,
    inner,
    b,
    ranks,
    order,
    tiles,
    blocks,
    first,
    count,
    held,
    y_row,
    r_slot,
    r_place,
    b_slot,
    b_place,
    b_row,
    b_rank,
    PLACES: tl.constexpr,
    MODULES: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of outputs, tiles). blocks: of `AdapterWeights`;  PLACES: see `_shrink_kernel`"""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    block = blocks + tl.program_id(0) * 4
    module, col, outputs, of_b = tl.load(block), tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    if PDL:
        tl.extra.cuda.gdc_wait()
    tile = tiles + tl.program_id(1) * 3
    slot, at, rows = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    place = tl.where(rows > 0, slot, 0) % PLACES
    slot = tl.where(rows > 0, slot, 0) // PLACES
    own = tl.load(ranks + slot * r_slot + place * r_place)
    if (rows == 0) | (own == 0):
        return
    lane, n = tl.arange(0, TILE), tl.arange(0, BLOCK_N)
    row = tl.load(order + at + lane, mask=lane < rows, other=-1) - first
    here = (lane < rows) & (row >= 0) & (row < count)
    at_b = b + slot.to(tl.int64) * b_slot + place.to(tl.int64) * b_place + (of_b + n)[None, :].to(tl.int64) * b_row
    made = tl.zeros([TILE, BLOCK_N], tl.float32)
    for begin in tl.range(0, RANK, BLOCK_R, num_stages=1):
        rank = begin + tl.arange(0, BLOCK_R)
        inside = (rank < own)[:, None] & (n < outputs)[None, :]
        right = tl.load(at_b + rank[:, None].to(tl.int64) * b_rank, mask=inside, other=0.0)
        sums = tl.zeros([TILE, BLOCK_R], tl.float32)
        for part in tl.static_range(PARTS):
            from_ = inner + ((part * held + at + lane)[:, None].to(tl.int64) * MODULES + module) * RANK + rank[None, :]
            sums += tl.load(from_, mask=(lane < rows)[:, None] & (rank < own)[None, :], other=0.0)
        made = tl.dot(sums.to(right.dtype), right, made, input_precision="ieee")
    to = y + row[:, None].to(tl.int64) * y_row + (col + n)[None, :]
    inside = here[:, None] & (n < outputs)[None, :]
    made += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, made.to(y.dtype.element_ty), mask=inside)
