"""Mamba 2 where drafts are verified, in one launch: each program has a part of the values of a head of a sequence.

A program replays the pending rows that were accepted (`quire.kernels.states`), writes its part of the matrix, and goes
on with the rows of the step. It has the matrix in registers, from its one read to its one write. Programs count
themselves: the last one of a group writes its columns and pending rows, when all have read the old ones, and norms the
results of all its heads. Sequences of more rows are replayed alone; the kernels for prompts go on from there.

Floor: that of decodes of one row (`triton_decode.py`).
"""

from __future__ import annotations

import torch

from quire.kernels import pdl
from quire.kernels.mamba.triton_call import NORMS, MambaCall, norm_group, step_of
from quire.kernels.state_chunks import padded
from quire.kernels.state_rows import convolved, counters, keep_columns, keep_rows, replayed_of, stand
from quire.kernels.triton_runtime import jit, tl

PART = 64  # most values of a part
LARGEST = 8192  # most numbers of a part, for 8 warps
NORMED = 512  # numbers of a group that a warp norms at a time


def mix_rows(call: MambaCall) -> None:
    """Compute the sequences of at most as many rows as a state has pending ones; replay all others."""
    form, meta, state, sizes = call.form, call.meta, call.state, call.sizes
    assert state.pending is not None and state.at is not None, "drafts are verified"
    in_pdl, values = pdl.in_use(), padded(form.head_dim)
    part = min(PART, values, max(16, LARGEST // sizes["NP"]))
    parts, num_seqs, weights = values // part, len(meta.slots), call.weights
    warps = max(1, min(8, sizes["NP"] * part // 1024))
    _rows_kernel[(form.heads * parts, num_seqs)](
        call.inner,
        call.gate,
        call.step,
        weights.conv,
        weights.bias,
        weights.rate,
        weights.shift,
        weights.skip,
        weights.norm,
        *call.places,
        state.columns,
        state.matrix,
        call.y,
        counters(meta, num_seqs * (form.groups + 1)),
        torch.empty(call.y.shape, dtype=torch.float32, device=call.y.device) if form.norm else None,
        torch.empty(len(call.y), form.heads * parts, dtype=torch.float32, device=call.y.device) if form.norm else None,
        state.pending,
        state.at,
        *call.strides,
        state.pending.stride(0),
        state.at.stride(0),
        form.eps,
        form.lowest,
        form.highest,
        **sizes,
        **call.columns,
        MOST=state.pending.shape[1],
        NORM=NORMS.index(form.norm),
        PART=part,
        PARTS=parts,
        PERP=padded(form.heads // form.groups),
        MEMBERS=1 << (form.heads // form.groups * parts - 1).bit_length(),
        BLOCK=min(NORMED * warps, padded(form.width // form.groups)),
        PDL=in_pdl,
        num_warps=warps,
        **pdl.options(in_pdl),
    )


@jit
def _row(
    source,
    raw,
    factors,
    place,
    j,
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Return b and c of the group, x and d of a head at row j, counted from the first row that is replayed.

    source    first rows of the step and of the columns, past, stride, pending rows, how many are replayed
    raw       place of the row's step of the head
    factors   conv, bias, shift, lowest, highest
    place     head, and aranges of the padded sizes of the group and of the part's values
    """
    given, own, past, stride, put_off, replayed = source
    conv, bias, shift, lowest, highest = factors
    head, n, value = place
    CHANNELS: tl.constexpr = H * P + 2 * G * N
    WIDTH: tl.constexpr = CHANNELS + H
    # Inputs and outputs together: loads of a number for each thread stay in one layout, smaller ones are done by all.
    side = tl.arange(0, 2)[:, None]
    at, inside = H * P + (side * G + head // (H // G)) * N + n[None, :], (n < N)[None, :] & (side < 2)
    both = convolved(
        given, own, conv, bias, j, past, at, inside, CHANNELS, TAPS, stride, False, put_off, replayed, WIDTH
    )
    b = tl.sum(tl.where(inside & (side == 0), both, 0.0), 0)
    c = tl.sum(tl.where(inside & (side == 1), both, 0.0), 0)
    at, inside = head * P + value, value < P
    x = convolved(given, own, conv, bias, j, past, at, inside, CHANNELS, TAPS, stride, False, put_off, replayed, WIDTH)
    d = step_of(tl.load(raw).to(tl.float32) + tl.load(shift + head), lowest, highest)
    return b, c, tl.where(inside, x, 0.0), d


@jit
def _columns_of_group(
    source,
    target,
    upto,
    group,
    n,
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    TAPS: tl.constexpr,
    TAPSP: tl.constexpr,
):
    """Write the columns of a group's inputs and outputs after `upto` rows to `target`. See `keep_columns`, `_row`."""
    given, own, past, stride, put_off, replayed = source
    CHANNELS: tl.constexpr = H * P + 2 * G * N
    for side in tl.static_range(2):
        at = H * P + (side * G + group) * N + n
        keep_columns(
            given, own, target, upto, past, at, n < N, CHANNELS, TAPS, TAPSP, stride, put_off, replayed, CHANNELS + H
        )


@jit
def _rows_kernel(
    inner,
    gate,
    step,
    conv,
    bias,
    rate,
    shift,
    skip,
    norm,
    query_start,
    seq_lens,
    slots,
    kept_at,
    kept,
    columns,
    matrix,
    y,
    arrived,
    results,
    squares,
    pending,
    lengths,
    inner_stride,
    gate_stride,
    step_stride,
    columns_stride,
    matrix_stride,
    pending_stride,
    lengths_stride,
    eps,
    lowest,
    highest,
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    NP: tl.constexpr,
    TAPS: tl.constexpr,
    TAPSP: tl.constexpr,
    MOST: tl.constexpr,
    NORM: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    PERP: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the rows of a sequence of at most MOST ones, for PART values of a head. Grid (H * PARTS, sequences).

    arrived    [sequences, G + 1] int32 zeros: programs of a group that have read its columns; at last those that have
               read the sequence's length. They are zeros afterwards
    results    [T, H * P] float32: results before their norm;  squares  [T, H * PARTS] sums of squares; None: no norm
    pending, lengths   `StateView.pending` and `at`, with MOST pending rows
    PERP       heads of a group, padded. For the other parameters see `_decode_kernel`
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    PER: tl.constexpr = H // G
    CHANNELS: tl.constexpr = H * P + 2 * G * N
    WIDTH: tl.constexpr = CHANNELS + H
    head, part, s = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    first = tl.load(query_start + s)
    rows = tl.load(query_start + s + 1) - first
    if rows <= 0:
        return
    group, past, slot = head // PER, tl.load(seq_lens + s) - rows, tl.load(slots + s).to(tl.int64)
    n, value = tl.arange(0, NP), part * PART + tl.arange(0, PART)
    in_value, x_at = value < P, head * P + value
    inside, at = (n < N)[:, None] & in_value[None, :], head * N * P + n[:, None] * P + value[None, :]
    held = tl.load(matrix + slot * matrix_stride + at, mask=inside & (past > 0), other=0.0).to(tl.float32)
    own, given = columns + slot * columns_stride, inner + first.to(tl.int64) * inner_stride
    put_off = pending + slot * pending_stride
    replayed = replayed_of(lengths + slot * lengths_stride, past, MOST)
    lazy = rows <= MOST
    source, place = (given, own, past, inner_stride, put_off, replayed), (head, n, value)
    factors, speed, share = (conv, bias, shift, lowest, highest), tl.exp(tl.load(rate + head)), tl.load(skip + head)
    for i in range(0, replayed):
        b, c, x, d = _row(source, put_off + i * WIDTH + CHANNELS + head, factors, place, i, G, H, N, P, TAPS)
        held = held * tl.exp(-speed * d) + b[:, None] * (d * x)[None, :]
        held = held.to(matrix.dtype.element_ty).to(tl.float32)  # as decodes of one row would leave it
    tl.store(matrix + slot * matrix_stride + at, held.to(matrix.dtype.element_ty), mask=inside)
    for i in range(0, tl.where(lazy, rows, 0)):
        j, row = i + replayed, (first + i).to(tl.int64)
        b, c, x, d = _row(source, step + row * step_stride + head, factors, place, j, G, H, N, P, TAPS)
        fade = tl.exp(-speed * d)
        o = fade * tl.sum(held * c[:, None], 0) + (tl.sum(b * c) * d + share) * x
        held = held * fade + b[:, None] * (d * x)[None, :]
        held = held.to(matrix.dtype.element_ty).to(tl.float32)
        for k in range(0, 2):
            if tl.load(kept_at + 2 * slot + k) == past + i + 1:
                target = tl.load(kept + 2 * slot + k).to(tl.int64)
                copied = columns + target * columns_stride
                tl.store(matrix + target * matrix_stride + at, held.to(matrix.dtype.element_ty), mask=inside)
                keep_columns(
                    given,
                    own,
                    copied,
                    j + 1,
                    past,
                    x_at,
                    in_value,
                    CHANNELS,
                    TAPS,
                    TAPSP,
                    inner_stride,
                    put_off,
                    replayed,
                    WIDTH,
                )
                if (head % PER == 0) & (part == 0):
                    _columns_of_group(source, copied, j + 1, group, n, G, H, N, P, TAPS, TAPSP)
        if NORM != 2:
            z = tl.load(gate + row * gate_stride + x_at, mask=in_value, other=0.0).to(tl.float32)
            o *= z * tl.sigmoid(z)
        if NORM == 0:
            tl.store(y + row * (H * P) + x_at, o.to(y.dtype.element_ty), mask=in_value)
        else:
            tl.store(results + row * (H * P) + x_at, o, mask=in_value)
            tl.store(squares + row * (H * PARTS) + head * PARTS + part, tl.sum(o * o))
    keep_columns(
        given, own, own, replayed, past, x_at, in_value, CHANNELS, TAPS, TAPSP, inner_stride, put_off, replayed, WIDTH
    )
    if lazy:
        keep_rows(given, put_off, rows, x_at, in_value, inner_stride, WIDTH)
    standing = (kept_at, kept, lengths, lengths_stride)
    stand(arrived + tl.num_programs(1) * G + s, standing, slot, past, rows, lazy, H * PARTS)
    tl.debug_barrier()  # all threads have read the columns of the group, and written their part
    if tl.atomic_add(arrived + s * G + group, 1, sem="acq_rel") == PER * PARTS - 1:
        tl.store(arrived + s * G + group, 0)
        _columns_of_group(source, own, replayed, group, n, G, H, N, P, TAPS, TAPSP)
        if lazy:
            for side in tl.static_range(2):
                keep_rows(given, put_off, rows, H * P + (side * G + group) * N + n, n < N, inner_stride, WIDTH)
            member = tl.arange(0, PERP)
            steps = step + first.to(tl.int64) * step_stride
            keep_rows(steps, put_off + CHANNELS, rows, group * PER + member, member < PER, step_stride, WIDTH)
            if NORM != 0:
                for i in range(0, rows):
                    row = (first + i).to(tl.int64)
                    sums = (squares + row * (H * PARTS), results + row * (H * P))
                    outputs = (gate + row * gate_stride, norm, y + row * (H * P), eps)
                    norm_group(sums, outputs, group, PER, P, PARTS, MEMBERS, BLOCK, NORM)
