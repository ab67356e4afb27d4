"""Decodes of one row by Mamba 2, in one launch: each program has parts of the values of some heads.

A program keeps a part of a matrix in registers, from its one read to its one write, and reads the next part while it
computes. Parts of a group share columns of inputs and outputs, and a norm. Programs count the parts that are done: the
last one writes the new columns, when all have read the old ones, and norms the results of all.

Floor: 8 N P bytes a decode and head, the matrix read and written once. 32 decodes with the 64 heads of 128 x 64 of
Nemotron 3 Nano move 134 MB: 31 us at 4.3 TB/s.
"""

from __future__ import annotations

import torch

from quire.kernels import pdl
from quire.kernels.mamba.triton_call import NORMS, MambaCall, norm_group, step_of
from quire.kernels.state_chunks import padded
from quire.kernels.state_rows import convolved, keep_columns, part_of, read_part
from quire.kernels.triton_runtime import INTERPRETED, jit, tl

PART = 64  # most values of a part
LARGEST = 8192  # most numbers of a part, for 8 warps
PER_THREAD = 32  # numbers of a part, twice: this one and the next
REGISTERS = 128  # of a thread: two programs run at once
PROGRAMS = 264  # at most: as many as run at once
NORMED = 512  # numbers of a group that a warp norms at a time


def mix_decodes(call: MambaCall) -> None:
    """Compute the sequences of one row, and update their states."""
    form, meta, state, sizes = call.form, call.meta, call.state, call.sizes
    num_seqs, in_pdl, values = len(meta.slots), pdl.in_use(), padded(form.head_dim)
    part = min(PART, values, max(16, LARGEST // sizes["NP"]))
    of_seq, warps = form.heads * (values // part), max(1, min(8, sizes["NP"] * part // (32 * PER_THREAD)))
    each = -(-num_seqs * of_seq // PROGRAMS)
    made = meta.plans.get(key := ("mamba decodes", num_seqs, form))
    if not isinstance(made, tuple):
        counts = torch.zeros(num_seqs, form.groups, dtype=torch.int32, device=call.y.device)
        parts, squares = (
            torch.empty(num_seqs, width, dtype=torch.float32, device=call.y.device) for width in (form.width, of_seq)
        )
        meta.plans[key] = made = counts, parts, squares
    weights = call.weights
    _decode_kernel[(-(-num_seqs * of_seq // each),)](
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
        *made,
        *call.strides,
        form.eps,
        form.lowest,
        form.highest,
        num_seqs,
        each,
        **sizes,
        **call.columns,
        NORM=NORMS.index(form.norm),
        PART=part,
        PARTS=values // part,
        MEMBERS=1 << (of_seq // form.groups - 1).bit_length(),
        BLOCK=min(NORMED * warps, padded(form.width // form.groups)),
        PDL=in_pdl,
        num_warps=warps,
        **({} if INTERPRETED else {"maxnreg": REGISTERS}),
        **pdl.options(in_pdl),
    )


@jit(do_not_specialize=["num_seqs", "each"])
def _decode_kernel(
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
    counts,
    parts,
    squares,
    inner_stride,
    gate_stride,
    step_stride,
    columns_stride,
    matrix_stride,
    eps,
    lowest,
    highest,
    num_seqs,
    each,
    G: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    NP: tl.constexpr,
    TAPS: tl.constexpr,
    TAPSP: tl.constexpr,
    NORM: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the rows of the sequences that have one. A program has `each` parts of PART values of a head. Grid (.,).

    counts    [sequences, G] int32 zeros: parts of a group that are done. They are zeros afterwards
    parts     [sequences, H * P] float32: results before their norm;  squares  [sequences, H * PARTS] sums of squares
    strides   from row to row, and from state to state, in elements
    NORM      index in `NORMS`;  PARTS  parts of a head's values;  MEMBERS  parts of a group, padded
    NP, TAPSP   N, and the number of columns, padded to powers of two;  BLOCK  numbers that are normed at a time
    For the other parameters see `quire.kernels.mamba` and `quire.kernels.states`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    PER: tl.constexpr = H // G
    WIDTH: tl.constexpr = H * P
    CHANNELS: tl.constexpr = WIDTH + 2 * G * N
    places, size = (query_start, seq_lens, slots), (N, P)
    n, span = tl.arange(0, NP), tl.arange(0, PART)
    in_state = n < N
    begin = tl.program_id(0) * each
    end = tl.minimum(begin + each, num_seqs * (H * PARTS))
    following = read_part(begin, places, matrix, matrix_stride, n, span, size, G, H, PARTS, PART)
    for number in range(begin, end):
        held = following.to(tl.float32)
        last = tl.minimum(number + 1, end - 1)
        following = read_part(last, places, matrix, matrix_stride, n, span, size, G, H, PARTS, PART)
        s, head, part, at_row, slot, past = part_of(number, places, G, H, PARTS)
        if at_row >= 0:
            row, group, value = at_row.to(tl.int64), head // PER, part * PART + span
            in_value = value < P
            inside, at = in_state[:, None] & in_value[None, :], head * N * P + n[:, None] * P + value[None, :]
            own, given = columns + slot * columns_stride, inner + row * inner_stride
            b_at, c_at, x_at = WIDTH + group * N + n, WIDTH + (G + group) * N + n, head * P + value
            # Inputs and outputs together: loads of a number for each thread stay in one layout, smaller ones are done
            # by all.
            side = tl.arange(0, 2)[:, None]
            both_at, in_both = WIDTH + (side * G + group) * N + n[None, :], in_state[None, :] & (side < 2)
            both = convolved(given, own, conv, bias, 0, past, both_at, in_both, CHANNELS, TAPS, inner_stride, True)
            b = tl.sum(tl.where(in_both & (side == 0), both, 0.0), 0)
            c = tl.sum(tl.where(in_both & (side == 1), both, 0.0), 0)
            x = convolved(given, own, conv, bias, 0, past, x_at, in_value, CHANNELS, TAPS, inner_stride, True)
            x = tl.where(in_value, x, 0.0)
            raw = tl.load(step + row * step_stride + head).to(tl.float32) + tl.load(shift + head)
            d = step_of(raw, lowest, highest)
            fade = tl.exp(-tl.exp(tl.load(rate + head)) * d)
            z_at = gate + row * gate_stride + x_at
            for k in tl.static_range(2):
                if tl.load(kept_at + 2 * slot + k) == past + 1:
                    copied = columns + tl.load(kept + 2 * slot + k).to(tl.int64) * columns_stride
                    keep_columns(given, own, copied, 1, past, x_at, in_value, CHANNELS, TAPS, TAPSP, inner_stride)
                    if (head % PER == 0) & (part == 0):
                        keep_columns(given, own, copied, 1, past, b_at, in_state, CHANNELS, TAPS, TAPSP, inner_stride)
                        keep_columns(given, own, copied, 1, past, c_at, in_state, CHANNELS, TAPS, TAPSP, inner_stride)
            keep_columns(given, own, own, 1, past, x_at, in_value, CHANNELS, TAPS, TAPSP, inner_stride)
            # The sum reads the matrix before its update, so the update does not wait for it.
            o = fade * tl.sum(held * c[:, None], 0) + (tl.sum(b * c) * d + tl.load(skip + head)) * x
            held = held * fade + b[:, None] * (d * x)[None, :]
            for k in tl.static_range(2):
                if tl.load(kept_at + 2 * slot + k) == past + 1:
                    target = tl.load(kept + 2 * slot + k).to(tl.int64)
                    tl.store(matrix + target * matrix_stride + at, held.to(matrix.dtype.element_ty), mask=inside)
            tl.store(matrix + slot * matrix_stride + at, held.to(matrix.dtype.element_ty), mask=inside)
            if NORM != 2:
                z = tl.load(z_at, mask=in_value, other=0.0).to(tl.float32)
                o *= z * tl.sigmoid(z)
            if NORM == 0:
                tl.store(y + row * WIDTH + x_at, o.to(y.dtype.element_ty), mask=in_value)
            else:
                tl.store(parts + s * WIDTH + x_at, o, mask=in_value)
                tl.store(squares + s * (H * PARTS) + head * PARTS + part, tl.sum(o * o))
            tl.debug_barrier()  # all threads have read the columns of the group, and written their part
            if tl.atomic_add(counts + s * G + group, 1, sem="acq_rel") == PER * PARTS - 1:
                tl.store(counts + s * G + group, 0)
                keep_columns(given, own, own, 1, past, b_at, in_state, CHANNELS, TAPS, TAPSP, inner_stride)
                keep_columns(given, own, own, 1, past, c_at, in_state, CHANNELS, TAPS, TAPSP, inner_stride)
                if NORM != 0:
                    sums = (squares + s * (H * PARTS), parts + s * WIDTH)
                    outputs = (gate + row * gate_stride, norm, y + row * WIDTH, eps)
                    norm_group(sums, outputs, group, PER, P, PARTS, MEMBERS, BLOCK, NORM)
