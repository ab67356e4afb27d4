"""The experts' exchange in Triton: one kernel to dispatch, one to combine. See `quire.kernels.comm.exchange`.

Floors for two H200: a row of 2,048 in bfloat16 is 4 KiB, so 4,096 rows of each rank cross the link in 45 us each way
(372 GB/s, docs/log.md), if every row has experts on both ranks. Few rows take the time of a signal and two or three
loads over the link, about 4 us a kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.comm.exchange import MOST, PROGRAMS, Slots
from quire.kernels.comm.triton import _meet
from quire.kernels.quantize.rows import QuantizedRows
from quire.kernels.quantize.triton import magnitude, scale_of, to_eight_bits
from quire.kernels.triton_runtime import jit, tl, triton

WIDE = 2048  # columns of a tile
LANES = 8  # rows of all ranks that a program reads at a time, where there are many rows
WARPS = 8


def dispatch(
    x: Tensor, ids: Tensor, weights: Tensor, count: Tensor, owner: Tensor, slots: Slots, bound: int, first: int = 0
) -> tuple[Tensor | QuantizedRows, Tensor, Tensor, Tensor]:
    """Bring rows to the ranks of their experts. Return x [R, hidden], weights [R, k], ids [R, k] and y [R, hidden].

    R is ranks * bound; row r * bound + i is row i of rank r. ids are -1 in rows that this rank does not get. y lies in
    symmetric memory, with zeros in the rows that this rank gets: the residual for the experts kernel. The x that is
    returned has the form of the wire.

    x         [T, hidden] contiguous: rows of this replica, the same on its ranks
    ids       [T, k] int32 of experts, -1 for none;  weights  [T, k] float32
    count     int32 on the device: number of rows of x that count, at most T
    owner     [experts] int32: the rank of each expert in the group
    bound     most rows that a rank brings, at most `Layout.rows`; the same on all ranks
    first     row of x with which this exchange begins; it takes slots.each * bound rows at most
    Every rank makes the call, also without rows, and then `combine` before the next.
    """
    (_, hidden), k, layout = x.shape, ids.shape[1], slots.layout
    assert x.is_contiguous() and ids.is_contiguous() and weights.is_contiguous()
    assert (hidden, k, x.element_size()) == (layout.hidden, layout.top_k, layout.item_bytes) and bound <= layout.rows
    size, wire, scales = layout.ranks * bound, layout.wire, None
    x_all = torch.empty(size, hidden, dtype=torch.uint8 if wire.values else x.dtype, device=x.device)
    if wire.values:
        scales = torch.empty(wire.num_scales(hidden), size, dtype=torch.float32, device=x.device)
    ids_all, weights_all = ids.new_empty(size, k), weights.new_empty(size, k)
    rows = _rows(slots, bound)
    at = layout.offsets()
    _dispatch_kernel[(_programs(slots, bound, rows),)](
        x,
        ids,
        weights,
        count,
        owner,
        x_all,
        scales,
        ids_all,
        weights_all,
        slots.peers.buffers,
        slots.peers.signals,
        slots.peers.rank,
        bound,
        first,
        layout.ranks,
        triton.next_power_of_2(layout.ranks),
        slots.each,
        k,
        triton.next_power_of_2(k),
        hidden,
        min(WIDE, triton.next_power_of_2(hidden)),
        rows,
        MOST[wire.values],
        wire.group,
        wire.powers,
        at["x"],
        at["scales"],
        at["ids"],
        at["weights"],
        at["y"],
        num_warps=WARPS,
    )
    if scales is not None:
        dtype = torch.int8 if wire.values == "int8" else torch.float8_e4m3fn
        return QuantizedRows(x_all.view(dtype), scales.t(), x.dtype), weights_all, ids_all, slots.y(bound, x.dtype)
    return x_all, weights_all, ids_all, slots.y(bound, x.dtype)


def combine(
    residual: Tensor, y: Tensor, ids: Tensor, count: Tensor, owner: Tensor, slots: Slots, bound: int, first: int = 0
) -> Tensor:
    """Return residual [T, hidden] + the results of all ranks for its rows; it overwrites the residual.

    y   [ranks * bound, hidden] results of this rank's experts for the rows that `dispatch` brought. They are copied
        into symmetric memory unless they are there.

    Other arguments as those of `dispatch` before. Rows that are not of this exchange stay as they are.
    """
    layout, room = slots.layout, slots.y(bound, residual.dtype)
    assert residual.is_contiguous() and ids.is_contiguous() and y.shape == room.shape
    if y.data_ptr() != room.data_ptr():
        room.copy_(y)
    most = slots.each * bound
    rows = _rows(slots, most)
    _combine_kernel[(_programs(slots, most, rows),)](
        residual,
        ids,
        count,
        owner,
        slots.peers.buffers,
        slots.peers.signals,
        slots.peers.rank,
        bound,
        first,
        layout.ranks,
        slots.each,
        layout.top_k,
        triton.next_power_of_2(layout.top_k),
        layout.hidden,
        min(WIDE, triton.next_power_of_2(layout.hidden)),
        rows,
        layout.offsets()["y"],
        num_warps=WARPS,
    )
    return residual


def _rows(slots: Slots, rows: int) -> int:
    """Rows of a rank that a program takes at a time: one, unless there are more rows than programs."""
    return 1 if rows <= slots.peers.blocks else max(1, LANES // triton.next_power_of_2(slots.layout.ranks))


def _programs(slots: Slots, rows: int, tile: int) -> int:
    """Programs of a kernel, the same on all ranks. All must run at the same time, because they wait for each other."""
    return max(1, min(slots.peers.blocks, PROGRAMS, triton.cdiv(rows, tile)))


@jit
def _all_meet(signals, rank, RANKS: tl.constexpr):
    """Meet this program of all ranks. What they and the kernels before them wrote is then visible to all threads."""
    tl.debug_barrier()
    _meet(signals, rank, tl.program_id(0), RANKS)
    tl.debug_barrier()


@jit
def _owners(chosen, owner):
    """Return the rank of each chosen expert, -1 where there is none."""
    return tl.load(owner + chosen, mask=chosen >= 0, other=-1)


@jit
def _owners_of_rows(ids, owner, row, total, TOP_K: tl.constexpr, J: tl.constexpr):
    """Return the ranks [rows, J] of the experts of the rows `row` of ids; -1 for rows from `total` on."""
    choice = tl.arange(0, J)[None, :]
    mask = (row < total)[:, None] & (choice < TOP_K)
    return _owners(tl.load(ids + row[:, None] * TOP_K + choice, mask=mask, other=-1), owner)


@jit
def _publish(
    x,
    ids,
    weights,
    own,
    source,
    row,
    there,
    TOP_K: tl.constexpr,
    J: tl.constexpr,
    H: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    MOST: tl.constexpr,
    GROUP: tl.constexpr,
    POWERS: tl.constexpr,
    X_AT: tl.constexpr,
    S_AT: tl.constexpr,
    IDS_AT: tl.constexpr,
    W_AT: tl.constexpr,
):
    """Write ROWS rows `source` of x, ids and weights to the rows `row` of the buffer at the address `own`."""
    choice = tl.arange(0, J)[None, :]
    inside = there[:, None] & (choice < TOP_K)
    to, source = row[:, None].to(tl.int64), source[:, None].to(tl.int64)
    chosen = tl.load(ids + source * TOP_K + choice, mask=inside, other=-1)
    tl.store((own + IDS_AT).to(tl.pointer_type(tl.int32)) + to * TOP_K + choice, chosen, mask=inside)
    given = tl.load(weights + source * TOP_K + choice, mask=inside, other=0.0)
    tl.store((own + W_AT).to(tl.pointer_type(tl.float32)) + to * TOP_K + choice, given, mask=inside)
    scales = (own + S_AT).to(tl.pointer_type(tl.float32))
    if MOST > 0 and GROUP == 0:  # a scale for each row
        largest = tl.zeros([ROWS], tl.int32)
        for start in range(0, H, COLS):
            col = start + tl.arange(0, COLS)[None, :]
            part = tl.load(x + source * H + col, mask=there[:, None] & (col < H), other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(magnitude(part), 1))
        scale = scale_of(largest, MOST, POWERS)
        tl.store(scales + row, scale, mask=there)
    if MOST == 0:
        place = tl.multiple_of((own + X_AT).to(tl.pointer_type(x.dtype.element_ty)), 16)
    elif MOST == 127:
        place = tl.multiple_of((own + X_AT).to(tl.pointer_type(tl.int8)), 16)
    else:
        place = tl.multiple_of((own + X_AT).to(tl.pointer_type(tl.float8e4nv)), 16)
    for start in range(0, H, COLS):
        col = start + tl.arange(0, COLS)[None, :]
        mask = there[:, None] & (col < H)
        values = tl.load(x + source * H + col, mask=mask, other=0.0)
        if MOST == 0:
            tl.store(place + to * H + col, values, mask=mask)
        elif GROUP == 0:
            tl.store(place + to * H + col, to_eight_bits(values.to(tl.float32), scale[:, None], MOST), mask=mask)
        else:
            parts = tl.reshape(values.to(tl.float32), [ROWS, COLS // GROUP, GROUP])
            scale = scale_of(tl.max(magnitude(parts), 2), MOST, POWERS)
            group = start // GROUP + tl.arange(0, COLS // GROUP)[None, :]
            tl.store(scales + to * (H // GROUP) + group, scale, mask=there[:, None] & (group < H // GROUP))
            narrow = tl.reshape(to_eight_bits(parts, scale[:, :, None], MOST), [ROWS, COLS])
            tl.store(place + to * H + col, narrow, mask=mask)


@jit
def _pull(
    x_all,
    scales_all,
    base,
    row,
    to,
    mine,
    zeros,
    start,
    size,
    H: tl.constexpr,
    COLS: tl.constexpr,
    LANES: tl.constexpr,
    MOST: tl.constexpr,
    GROUP: tl.constexpr,
    X_AT: tl.constexpr,
    S_AT: tl.constexpr,
):
    """Copy COLS columns of LANES rows from the buffers at the addresses `base`, and zero the same part of y.

    zeros    pointer to y;  size  rows of x_all
    """
    col = start + tl.arange(0, COLS)[None, :]
    mask = mine[:, None] & (col < H)
    source = tl.multiple_of((base + X_AT).to(tl.pointer_type(x_all.dtype.element_ty)) + row.to(tl.int64) * H, 16)
    values = tl.load(source[:, None] + col, mask=mask, other=0, cache_modifier=".cg")
    goal = to[:, None].to(tl.int64) * H + col
    tl.store(x_all + goal, values, mask=mask)
    tl.store(zeros + goal, tl.zeros([LANES, COLS], zeros.dtype.element_ty), mask=mask)
    if MOST > 0 and GROUP > 0:
        group = start // GROUP + tl.arange(0, COLS // GROUP)[None, :]
        inside = mine[:, None] & (group < H // GROUP)
        scales = (base + S_AT).to(tl.pointer_type(tl.float32)) + row.to(tl.int64) * (H // GROUP)
        scale = tl.load(scales[:, None] + group, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(scales_all + group * size + to[:, None], scale, mask=inside)


@jit(do_not_specialize=["rank", "bound", "first"])
def _dispatch_kernel(
    x,
    ids,
    weights,
    count,
    owner,
    x_all,
    scales_all,
    ids_all,
    weights_all,
    buffers,
    signals,
    rank,
    bound,
    first,
    RANKS: tl.constexpr,
    PEERS: tl.constexpr,
    EACH: tl.constexpr,
    TOP_K: tl.constexpr,
    J: tl.constexpr,
    H: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    MOST: tl.constexpr,
    GROUP: tl.constexpr,
    POWERS: tl.constexpr,
    X_AT: tl.constexpr,
    S_AT: tl.constexpr,
    IDS_AT: tl.constexpr,
    W_AT: tl.constexpr,
    Y_AT: tl.constexpr,
):
    """Publish this rank's rows, meet all ranks, and pull the rows that have an expert here.

    Grid (programs,), the same on all ranks. Program p has the tiles p, p + programs, ... of ROWS rows of every rank.

    x .. owner           see `dispatch`
    x_all .. weights_all   outputs [RANKS * bound, H], in bytes on an 8-bit wire; scales [scales of a row,
                         RANKS * bound] float32, or None; ids and weights [RANKS * bound, TOP_K]
    buffers, signals     [RANKS] int64, see `Peers`;  rank  this rank
    PEERS, J             RANKS and TOP_K, padded to powers of two;  EACH  ranks of a replica
    COLS                 columns of a tile;  MOST  see `exchange.MOST`;  GROUP, POWERS  see `Wire`
    X_AT .. Y_AT         byte offsets of x, scales, ids, weights and y in a buffer
    """
    program, step, place = tl.program_id(0), tl.num_programs(0) * ROWS, rank % EACH
    own = tl.load(buffers + rank)
    total = tl.minimum(tl.maximum(tl.load(count) - first, 0), bound * EACH)
    number = (total + EACH - 1 - place) // EACH
    tl.store(own.to(tl.pointer_type(tl.int32)) + program, number)
    for at in range(program * ROWS, number, step):
        row = at + tl.arange(0, ROWS)
        _publish(
            x,
            ids,
            weights,
            own,
            first + row * EACH + place,
            row,
            row < number,
            TOP_K,
            J,
            H,
            COLS,
            ROWS,
            MOST,
            GROUP,
            POWERS,
            X_AT,
            S_AT,
            IDS_AT,
            W_AT,
        )
    _all_meet(signals, rank, RANKS)
    lane, choice = tl.arange(0, PEERS * ROWS), tl.arange(0, J)[None, :]
    peer, low = lane // ROWS, lane % ROWS
    known = peer < RANKS
    base = tl.load(buffers + peer, mask=known, other=0)
    counts = base.to(tl.pointer_type(tl.int32)) + program
    theirs = tl.minimum(tl.load(counts, mask=known, other=0, cache_modifier=".cg"), bound)
    most = tl.max(theirs, 0)
    ids_at = (base + IDS_AT).to(tl.pointer_type(tl.int32))[:, None] + choice
    weights_at = (base + W_AT).to(tl.pointer_type(tl.float32))[:, None] + choice
    zeros = tl.multiple_of((own + Y_AT).to(tl.pointer_type(x.dtype.element_ty)), 16)
    row, wanted = program * ROWS + low, choice < TOP_K
    coming = tl.load(
        ids_at + row[:, None] * TOP_K, mask=(known & (row < bound))[:, None] & wanted, other=-1, cache_modifier=".cg"
    )
    for at in range(program * ROWS, most, step):
        row = at + low
        there = row < theirs
        chosen = tl.where(there[:, None], coming, -1)
        row_next = row + step
        coming = tl.load(
            ids_at + row_next[:, None] * TOP_K,
            mask=(row_next < theirs)[:, None] & wanted,
            other=-1,
            cache_modifier=".cg",
        )
        mine = tl.max((_owners(chosen, owner) == rank).to(tl.int32), 1) > 0
        given = tl.load(weights_at + row[:, None] * TOP_K, mask=mine[:, None] & wanted, other=0.0, cache_modifier=".cg")
        to, inside = peer * bound + row, (known & (row < bound))[:, None] & wanted
        tl.store(ids_all + to[:, None] * TOP_K + choice, tl.where(mine[:, None], chosen, -1), mask=inside)
        tl.store(weights_all + to[:, None] * TOP_K + choice, given, mask=inside)
        if MOST > 0 and GROUP == 0:
            scales = (base + S_AT).to(tl.pointer_type(tl.float32))
            tl.store(scales_all + to, tl.load(scales + row, mask=mine, other=0.0, cache_modifier=".cg"), mask=mine)
        for start in range(0, H, COLS):
            _pull(
                x_all,
                scales_all,
                base,
                row,
                to,
                mine,
                zeros,
                start,
                RANKS * bound,
                H,
                COLS,
                PEERS * ROWS,
                MOST,
                GROUP,
                X_AT,
                S_AT,
            )
    done = tl.cdiv(tl.maximum(most - program * ROWS, 0), step) * step
    for at in range(program * ROWS + done, bound, step):  # no rank has rows here
        row = at + low
        to, inside = (peer * bound + row)[:, None] * TOP_K + choice, (known & (row < bound))[:, None] & wanted
        tl.store(ids_all + to, tl.full([PEERS * ROWS, J], -1, tl.int32), mask=inside)
        tl.store(weights_all + to, tl.zeros([PEERS * ROWS, J], tl.float32), mask=inside)


@jit(do_not_specialize=["rank", "bound", "first"])
def _combine_kernel(
    residual,
    ids,
    count,
    owner,
    buffers,
    signals,
    rank,
    bound,
    first,
    RANKS: tl.constexpr,
    EACH: tl.constexpr,
    TOP_K: tl.constexpr,
    J: tl.constexpr,
    H: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    Y_AT: tl.constexpr,
):
    """Meet all ranks, and add their results to the rows of this replica. Grid (programs,), the same on all ranks.

    residual             [T, H], overwritten;  ids, count, owner  see `dispatch`
    Other arguments as those of `_dispatch_kernel`.
    """
    program, step, lane = tl.program_id(0), tl.num_programs(0) * ROWS, tl.arange(0, ROWS)
    total = tl.minimum(tl.maximum(tl.load(count) - first, 0), bound * EACH)
    ids += first * TOP_K
    coming = _owners_of_rows(ids, owner, program * ROWS + lane, total, TOP_K, J)
    _all_meet(signals, rank, RANKS)
    for at in range(program * ROWS, total, step):
        row, owners = at + lane, coming
        coming = _owners_of_rows(ids, owner, row + step, total, TOP_K, J)
        source = ((rank // EACH * EACH + row % EACH) * bound + row // EACH).to(tl.int64)[:, None] * H
        place = residual + (first + row).to(tl.int64)[:, None] * H
        for start in range(0, H, COLS):
            col = start + tl.arange(0, COLS)[None, :]
            sums = tl.zeros([ROWS, COLS], tl.float32)
            for peer in tl.static_range(RANKS):
                mine = tl.max((owners == peer).to(tl.int32), 1)[:, None] > 0
                theirs = (tl.load(buffers + peer) + Y_AT).to(tl.pointer_type(residual.dtype.element_ty))
                part = tl.load(
                    tl.multiple_of(theirs, 16) + source + col, mask=mine & (col < H), other=0.0, cache_modifier=".cg"
                )
                sums += part.to(tl.float32)
            mask = (row < total)[:, None] & (col < H)
            sums += tl.load(place + col, mask=mask, other=0.0).to(tl.float32)
            tl.store(place + col, sums.to(residual.dtype.element_ty), mask=mask)
