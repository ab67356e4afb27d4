"""Products of adapters in two launches for any mixture of adapters and ranks.

    shrink   a program takes a tile of rows of one adapter, a module, and a part of K
    expand   a program takes pairs of a tile and a block of outputs in turn, and fetches B of the next pair meanwhile

The parts of K are added up in their order, by the program of shrink that ends last. Tiles come from a table that the
step writes, so grids depend on sizes alone. Ranks beyond those of the slot's adapter, rounded up to 8, do not count.
Sums are float32; they are rounded to the dtype of B before the second product, as B was.

With programmatic dependent launch both kernels read the tables, and fetch matrices, before the kernel before them has
ended (`AdapterRows.early`).

Floor: the matrices of each adapter of the step are read once. Llama-3.1-8B, rank 16: 84 MB in bfloat16, 19 us at
4.3 TB/s, beside two launches for each of 128 layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.lora import TILE, AdapterRows, AdapterWeights
from quire.kernels.lora.pairs import pair_rows as pair_rows
from quire.kernels.lora.triton_gated import expand_gated as expand_gated
from quire.kernels.lora.triton_gated import fuses as fuses
from quire.kernels.triton_runtime import jit, tl

RESIDENT = 396  # programs of expand: 3 on each of 132 multiprocessors
WANTED = 192  # programs of shrink, where all rows have one adapter
MOST_PARTS = 16
MOST_AHEAD = 1024  # numbers of K that a program of shrink fetches to the L2 cache before its predecessor has ended
COUNTERS = 8192  # of a layer: tiles times blocks of ranks
WARPS = 4


class Tiling(NamedTuple):
    """The work of a program.

    parts     of K
    deep      numbers of K of an iteration
    stages    iterations in flight
    outputs   of a block of expand
    """

    parts: int
    deep: int
    stages: int
    outputs: int


def tiling(weights: AdapterWeights, rows: AdapterRows, count: int) -> Tiling:
    """Return the tiling for `count` rows. It depends on sizes alone, as a captured step needs it."""
    modules, rank, width = weights.a.shape[-3:]
    tiles, size = max(1, -(-count // rows.tile)), max(16, _power(rank))
    blocks = modules * -(-rank // 64)
    deep = (512 if size <= 32 and rows.tile == TILE else 256) // weights.a.itemsize
    deep = min(deep, max(16, _power(width)))
    parts = max(1, min(MOST_PARTS, width // (2 * deep), -(-WANTED // (tiles * blocks))))
    parts = 1 << (parts.bit_length() - 1)  # a power of two, so that few kernels are compiled
    parts = parts if len(rows.tiles) * blocks <= COUNTERS else 1
    many = rows.tile == TILE and weights.num_outputs * tiles > 1 << 16
    return Tiling(parts, deep, 3, _outputs(weights)[many])


def _outputs(weights: AdapterWeights) -> tuple[int, int]:
    """Return the outputs of a block: for few pairs of a tile and a block, and for many."""
    size = max(16, _power(weights.rank))
    most = min(8192 // size, max(16, _power(weights.most_outputs)))
    return min(128, most), min(256 if size <= 32 else 128, most)


def prepare(weights: AdapterWeights) -> None:
    """Make the tables that kernels read: no memory can be written from the host while a CUDA graph is captured."""
    _counters(weights, weights.b.device)
    for size in _outputs(weights):
        _blocks(weights, size, weights.b.device)


def shrink(
    x: Tensor,
    weights: AdapterWeights,
    rows: AdapterRows,
    first: int = 0,
    scales: Tensor | None = None,
    walk: Tiling | None = None,
) -> Tensor:
    """Return the products A x, [T, modules, R] in the dtype of B, a row for each index of `rows.order`.

    Of pairs (`rows.top_k`) x has a row for each pair, or one for each token.

    scales   [T, k] factors of the pairs;  walk  tiling to use; None: `tiling` chooses it
    """
    modules, rank, width = weights.a.shape[-3:]
    count = len(rows.order) if rows.top_k else len(x)
    walk = walk or tiling(weights, rows, count)
    inner = torch.empty(len(rows.order), modules, rank, dtype=weights.b.dtype, device=x.device)
    if not len(rows.tiles):
        return inner
    alone, step = walk.parts == 1, -(-width // walk.parts)
    sums = None if alone else torch.empty(walk.parts, *inner.shape, dtype=torch.float32, device=x.device)
    block, in_pdl = min(64, max(16, _power(rank))), pdl.in_use()
    _shrink_kernel[(modules * -(-rank // block), len(rows.tiles), walk.parts)](
        x,
        weights.a,
        weights.ranks,
        rows.order,
        rows.tiles,
        scales,
        sums,
        inner,
        None if alone else _counters(weights, x.device),
        first,
        count,
        width,
        step,
        len(rows.order),
        modules,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        *_strides(weights.ranks, 0),
        *_strides(weights.a, 3),
        *weights.a.stride()[-3:],
        max(1, count // max(1, len(x))),
        _places(weights),
        rank,
        block,
        walk.deep,
        walk.stages,
        _power(-(-min(step, MOST_AHEAD) // 64)) if weights.a.stride(-1) == 1 else 0,
        rows.tile,
        walk.parts,
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
    (_, modules, rank), walk = inner.shape, walk or tiling(weights, rows, len(y))
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
        modules,
        len(table),
        len(rows.tiles),
        y.stride(0),
        *_strides(weights.ranks, 0),
        *_strides(weights.b, 2),
        *weights.b.stride()[-2:],
        _places(weights),
        rank,
        max(16, _power(rank)),
        walk.outputs,
        rows.tile,
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


def _places(weights: AdapterWeights) -> int:
    """Return the experts of a layer of experts, 1 of another layer."""
    return weights.ranks.shape[1] if weights.ranks.dim() == 2 else 1


def _strides(matrices: Tensor, dims: int) -> tuple[int, int]:
    """Return the strides of slots and of experts. dims: dimensions of a slot of a layer without experts"""
    return matrices.stride(0), matrices.stride(1) if matrices.dim() > 1 + dims else 0


def _counters(weights: AdapterWeights, device: torch.device) -> Tensor:
    """Return [COUNTERS] int32 zeros, which kernels leave as zeros. They are a layer's own."""
    if (0, 0) not in weights.tables:
        weights.tables[0, 0] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    return weights.tables[0, 0]


def _blocks(weights: AdapterWeights, size: int, device: torch.device) -> tuple[Tensor, int]:
    """Return blocks of outputs (`AdapterWeights.blocks`), and the alignment by which their numbers are divided."""
    align = 16 if all((run.first | run.rows | run.row) % 16 == 0 for run in weights.runs) else 1
    return weights.blocks(size, device, align), align


@jit(do_not_specialize=["first", "count", "held", "modules"])
def _shrink_kernel(
    x,
    a,
    ranks,
    order,
    tiles,
    scales,
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
    r_slot,
    r_place,
    a_slot,
    a_place,
    a_module,
    a_rank,
    a_width,
    PAIRS: tl.constexpr,
    PLACES: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEEP: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (modules * blocks of ranks, tiles, PARTS). Shapes as in `quire.kernels.lora`; strides are in numbers.

    count, held       rows of the step, or pairs, and rows of `inner`;  step  numbers of K of a part
    scales            [pairs] float32 factors of the sums; None: 1
    sums              [PARTS, held, modules, RANK] float32; None with one part
    inner             [held, modules, RANK], output;  counters  [tiles * blocks of ranks] int32 zeros, or None
    PAIRS, PLACES     pairs that read a row of x; experts of a layer of experts: a tile's slot is slot * PLACES + place
    DEEP, STAGES      numbers of K of an iteration; iterations in flight
    LINES             lines of 64 numbers of A that are fetched to the L2 cache before `gdc_wait`, of each rank
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not EARLY:
            tl.extra.cuda.gdc_wait()
    tile = tiles + tl.program_id(1) * 3
    slot, at, rows = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    slot, place = tl.where(rows > 0, slot, 0) // PLACES, tl.where(rows > 0, slot, 0) % PLACES
    own = tl.load(ranks + slot * r_slot + place * r_place)
    module = tl.program_id(0) % modules
    lowest = tl.program_id(0) // modules * BLOCK_R
    lane, rank = tl.arange(0, TILE), lowest + tl.arange(0, BLOCK_R)
    row = tl.load(order + at + lane, mask=lane < rows, other=-1) - first
    begin = tl.program_id(2) * step
    end = tl.minimum(begin + step, width)
    of_a = a + slot.to(tl.int64) * a_slot + place.to(tl.int64) * a_place + module.to(tl.int64) * a_module
    of_a += rank[None, :].to(tl.int64) * a_rank
    if PDL:
        if EARLY:
            if (rows > 0) & (own > lowest):
                _prefetch(of_a, begin, end, tl.minimum(own, RANK) - lowest, a_rank, LINES, BLOCK_R)
            tl.extra.cuda.gdc_wait()
    if (rows == 0) | (own <= lowest):
        return
    here, known = (lane < rows) & (row >= 0) & (row < count), rank < own
    xs = x + (row // PAIRS)[:, None].to(tl.int64) * x_row + module.to(tl.int64) * x_module
    acc = tl.zeros([TILE, BLOCK_R], tl.float32)
    for k in tl.range(begin, end, DEEP, num_stages=STAGES):
        col = k + tl.arange(0, DEEP)
        left = tl.load(xs + col[None, :], mask=here[:, None] & (col < end)[None, :], other=0.0)
        right = tl.load(
            of_a + col[:, None].to(tl.int64) * a_width, mask=(col < end)[:, None] & known[None, :], other=0.0
        )
        acc = tl.dot(left.to(right.dtype), right, acc, input_precision="ieee")
    inside = (lane < rows)[:, None] & (rank < RANK)[None, :]
    target = ((at + lane)[:, None] * modules + module).to(tl.int64) * RANK + rank[None, :]
    if PARTS == 1:
        if scales is not None:
            acc *= tl.load(scales + row, mask=here, other=0.0)[:, None]
        tl.store(inner + target, acc.to(inner.dtype.element_ty), mask=inside)
    else:
        each = held.to(tl.int64) * modules * RANK
        tl.store(sums + tl.program_id(2) * each + target, acc, mask=inside)
        counter = counters + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.debug_barrier()  # all of the part is written before it is counted
        if tl.atomic_add(counter, 1, sem="acq_rel") == PARTS - 1:
            tl.store(counter, 0)
            result = tl.zeros([TILE, BLOCK_R], tl.float32)
            for part in tl.static_range(PARTS):
                result += tl.load(sums + part * each + target, mask=inside, other=0.0, cache_modifier=".cg")
            if scales is not None:  # once, behind the sum of all parts
                result *= tl.load(scales + row, mask=here, other=0.0)[:, None]
            tl.store(inner + target, result.to(inner.dtype.element_ty), mask=inside)


@jit
def _prefetch(of_a, begin, end, ranks, a_rank, LINES: tl.constexpr, BLOCK_R: tl.constexpr):
    """Fetch lines of 64 numbers of A to the L2 cache, from `begin` on. of_a: pointers [1, BLOCK_R]; ranks: of them"""
    if LINES > 0:
        col = tl.minimum(begin + tl.arange(0, LINES)[:, None] * 64, end - 1)
        back = tl.maximum(tl.arange(0, BLOCK_R) - ranks + 1, 0)  # of ranks that the adapter lacks: to its last one
        at = of_a - back[None, :].to(tl.int64) * a_rank + col.to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [at.to(tl.int64, bitcast=True)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


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
    r_slot,
    r_place,
    b_slot,
    b_place,
    b_row,
    b_rank,
    PLACES: tl.constexpr,
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
    slot, place = tl.where(rows > 0, slot, 0) // PLACES, tl.where(rows > 0, slot, 0) % PLACES
    own = tl.where(rows > 0, tl.load(ranks + slot * r_slot + place * r_place), 0)
    lane, rank, n = tl.arange(0, TILE), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_N)
    row = tl.load(order + at + lane, mask=lane < rows, other=-1)
    from_ = b + slot.to(tl.int64) * b_slot + place.to(tl.int64) * b_place
    from_ += (of_b + n)[None, :].to(tl.int64) * b_row + rank[:, None].to(tl.int64) * b_rank
    whole = (own + 7) // 8 * 8  # so that 8 numbers are read at once
    right = tl.load(from_, mask=(rank < whole)[:, None] & (n < outputs * ALIGN)[None, :], other=0.0)
    return at, own, row, module, col, outputs, right


@jit(do_not_specialize=["first", "count", "modules", "num_blocks", "num_tiles"])
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
    modules,
    num_blocks,
    num_tiles,
    y_row,
    r_slot,
    r_place,
    b_slot,
    b_place,
    b_row,
    b_rank,
    PLACES: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs take pairs of a tile and a block of outputs in turn. Strides and PLACES as for `_shrink_kernel`.

    blocks   of `_blocks`;  used  see `AdapterRows`
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not EARLY:
            tl.extra.cuda.gdc_wait()
    total = num_tiles * num_blocks
    if used is not None:
        total = tl.load(used) * num_blocks
    begin = tl.program_id(0)
    at, own, row, module, col, outputs, right = _fetch(
        begin,
        total,
        b,
        ranks,
        order,
        tiles,
        blocks,
        num_blocks,
        r_slot,
        r_place,
        b_slot,
        b_place,
        b_row,
        b_rank,
        PLACES,
        BLOCK_R,
        BLOCK_N,
        TILE,
        ALIGN,
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
        from_ = inner + ((at + lane)[:, None] * modules + module).to(tl.int64) * RANK + rank[None, :]
        read = here[:, None] & (rank < (own + 7) // 8 * 8)[None, :]
        left, right_now = tl.load(from_, mask=read, other=0.0), tl.where((rank < own)[:, None], right, 0.0)
        following = item + tl.num_programs(0)
        if following < total:  # B of the next pair is on its way beside the product
            at, own, row, module, col, outputs, right = _fetch(
                following,
                total,
                b,
                ranks,
                order,
                tiles,
                blocks,
                num_blocks,
                r_slot,
                r_place,
                b_slot,
                b_place,
                b_row,
                b_rank,
                PLACES,
                BLOCK_R,
                BLOCK_N,
                TILE,
                ALIGN,
            )
        made += tl.dot(left, right_now, input_precision="ieee")
        tl.store(to, made.to(y.dtype.element_ty), mask=inside)
