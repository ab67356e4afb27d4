"""Expand and the gated activation behind it in one launch. Floor: the products are read once, and half of it written.

A program takes pairs of a tile of rows of one adapter and a block of outputs of gate and up in turn. Then it takes
pairs of rows as they come and more outputs, of which it computes the rows that no adapter changes.
"""

from __future__ import annotations

from torch import Tensor

from quire.kernels import pdl
from quire.kernels.activation import checked
from quire.kernels.activation.triton import gated_of
from quire.kernels.lora import TILE, AdapterRows, AdapterWeights
from quire.kernels.triton_runtime import jit, tl

RESIDENT = 396  # programs: 3 on each of 132 multiprocessors
SPAN = 8  # blocks of rows without an adapter that a program takes at once


def fuses(weights: AdapterWeights) -> bool:
    """Return True if `expand_gated` can run a layer: adapters change all of gate and all of up."""
    half = sum(run.rows for run in weights.runs) // 2
    return [(run.first, run.rows) for run in weights.runs] == [(0, half), (half, half)]


def expand_gated(y: Tensor, inner: Tensor, weights: AdapterWeights, rows: AdapterRows, act: str) -> Tensor:
    """Return the activation [T, I] of y [T, 2I], gate and up, with the products B of inner added. y stays as it is.

    act: see `quire.kernels.activation`; inner of all rows of the step
    """
    (_, modules, rank), (count, both) = inner.shape, y.shape
    out, size, in_pdl = y.new_empty(count, both // 2), max(16, 1 << (rank - 1).bit_length()), pdl.in_use()
    if not count:
        return out
    block = min(128 if rows.tile == TILE else 64, 4096 // size, max(16, 1 << (both // 2 - 1).bit_length()))
    blocks = -(-both // 2 // block)
    pairs = len(rows.tiles) * blocks + -(-count // TILE) * -(-blocks // SPAN)
    gate, up = weights.runs
    _gated_kernel[(min(RESIDENT, pairs),)](
        y,
        out,
        inner,
        weights.b,
        weights.ranks,
        rows.slots,
        rows.order,
        rows.tiles,
        rows.used,
        count,
        both // 2,
        modules,
        len(rows.tiles),
        gate.module,
        up.module,
        gate.row,
        up.row,
        y.stride(0),
        *weights.b.stride(),
        rank,
        size,
        block,
        rows.tile,
        checked(act),
        SPAN,
        rows.early,
        in_pdl,
        num_warps=4 if rank <= 128 else 8,
        num_stages=1,
        **pdl.options(in_pdl),
    )
    return out


@jit
def _fetch(
    item,
    total,
    blocks,
    width,
    b,
    ranks,
    order,
    tiles,
    gate_row,
    up_row,
    b_slot,
    b_row,
    b_rank,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return all of a pair that no kernel of the step writes. The rank is 0 for a tile that changes nothing.

    first index in `order`, ranks, rows of `order` [TILE], first output, and B of gate and of up [BLOCK_R, BLOCK_N]
    """
    there = item < total
    tile = tiles + item // blocks * 3
    slot, at = tl.load(tile, mask=there, other=0), tl.load(tile + 1, mask=there, other=0)
    rows = tl.load(tile + 2, mask=there, other=0)
    own = tl.where(rows > 0, tl.load(ranks + tl.where(rows > 0, slot, 0)), 0)
    lane, rank = tl.arange(0, TILE), tl.arange(0, BLOCK_R)
    row = tl.load(order + at + lane, mask=lane < rows, other=-1)
    first = item % blocks * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    whole = (own + 7) // 8 * 8  # so that 8 numbers are read at once
    inside = (rank < whole)[:, None] & (n < width)[None, :]
    from_ = b + slot.to(tl.int64) * b_slot + rank[:, None].to(tl.int64) * b_rank
    gate = tl.load(from_ + (gate_row + n)[None, :].to(tl.int64) * b_row, mask=inside, other=0.0)
    up = tl.load(from_ + (up_row + n)[None, :].to(tl.int64) * b_row, mask=inside, other=0.0)
    return at, own, row, first, gate, up


@jit(do_not_specialize=["count", "modules", "num_tiles", "gate_module", "up_module"])
def _gated_kernel(
    y,
    out,
    inner,
    b,
    ranks,
    slots,
    order,
    tiles,
    used,
    count,
    width,
    modules,
    num_tiles,
    gate_module,
    up_module,
    gate_row,
    up_row,
    y_row,
    b_slot,
    b_row,
    b_rank,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
    ACT: tl.constexpr,
    SPAN: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs take pairs in turn. Shapes as in `quire.kernels.lora`; strides are in numbers.

    count, width            rows, and outputs of gate
    gate_module .. up_row   module of gate and of up, and the first of their rows of B
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not EARLY:
            tl.extra.cuda.gdc_wait()
    blocks = tl.cdiv(width, BLOCK_N)
    total = num_tiles * blocks
    if used is not None:
        total = tl.load(used) * blocks
    begin, programs = tl.program_id(0), tl.num_programs(0)
    at, own, row, first, gate_b, up_b = _fetch(
        begin,
        total,
        blocks,
        width,
        b,
        ranks,
        order,
        tiles,
        gate_row,
        up_row,
        b_slot,
        b_row,
        b_rank,
        BLOCK_R,
        BLOCK_N,
        TILE,
    )
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_wait()
    lane, rank = tl.arange(0, TILE), tl.arange(0, BLOCK_R)
    for item in range(begin, total, programs):
        here, n = (row >= 0) & (row < count) & (own > 0), first + tl.arange(0, BLOCK_N)
        inside = here[:, None] & (n < width)[None, :]
        given = y + row[:, None].to(tl.int64) * y_row + n[None, :]
        gates, ups = tl.load(given, mask=inside, other=0.0), tl.load(given + width, mask=inside, other=0.0)
        to = out + row[:, None].to(tl.int64) * width + n[None, :]
        read = here[:, None] & (rank < (own + 7) // 8 * 8)[None, :]
        from_ = inner + (at + lane)[:, None].to(tl.int64) * modules * RANK + rank[None, :]
        of_gate = tl.load(from_ + gate_module * RANK, mask=read, other=0.0)
        of_up = tl.load(from_ + up_module * RANK, mask=read, other=0.0)
        known = (rank < own)[:, None]
        gate_now, up_now = tl.where(known, gate_b, 0.0), tl.where(known, up_b, 0.0)
        following = item + programs
        if following < total:  # B of the next pair is on its way beside the products
            at, own, row, first, gate_b, up_b = _fetch(
                following,
                total,
                blocks,
                width,
                b,
                ranks,
                order,
                tiles,
                gate_row,
                up_row,
                b_slot,
                b_row,
                b_rank,
                BLOCK_R,
                BLOCK_N,
                TILE,
            )
        gate = gates.to(tl.float32) + tl.dot(of_gate, gate_now, input_precision="ieee")
        up = ups.to(tl.float32) + tl.dot(of_up, up_now, input_precision="ieee")
        tl.store(to, gated_of(gate, up, ACT).to(out.dtype.element_ty), mask=inside)
    spans = tl.cdiv(blocks, SPAN)
    for item in range(programs - 1 - begin, tl.cdiv(count, 16) * spans, programs):  # the last ones have no other pair
        other = item // spans * 16 + tl.arange(0, 16)
        slot = tl.load(slots + other, mask=other < count, other=-1)
        changes = tl.load(ranks + slot, mask=slot >= 0, other=0)
        plain = (other < count) & (changes == 0)
        if tl.max(plain.to(tl.int32), 0) > 0:
            source = y + other[:, None].to(tl.int64) * y_row
            target = out + other[:, None].to(tl.int64) * width
            for block in range(item % spans * SPAN, tl.minimum(item % spans * SPAN + SPAN, blocks)):
                col = block * BLOCK_N + tl.arange(0, BLOCK_N)
                there = plain[:, None] & (col < width)[None, :]
                plain_gate = tl.load(source + col[None, :], mask=there, other=0.0).to(tl.float32)
                plain_up = tl.load(source + width + col[None, :], mask=there, other=0.0).to(tl.float32)
                tl.store(
                    target + col[None, :], gated_of(plain_gate, plain_up, ACT).to(out.dtype.element_ty), mask=there
                )
