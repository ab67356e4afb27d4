"""Decodes of one row by the gated delta rule, in one launch: each program has parts of the values of some heads.

A program keeps a part of a matrix in registers, from its one read to its one write, and reads the next part while it
computes. Programs that share columns of queries and keys, or the norm of a head, count their arrivals: the last one to
arrive writes the new columns, when all have read the old ones, and the last one of a head norms and gates its result.

Floor: 8 Dk Dv bytes a decode and head, the matrix read and written once.
"""

from __future__ import annotations

import torch

from quire.kernels import pdl
from quire.kernels.delta.triton_prompts import DeltaCall
from quire.kernels.delta.triton_rows import convolved, keep_columns, log_decay, opened, unit
from quire.kernels.triton_runtime import INTERPRETED, jit, tl

PART = 64  # most values of a part
PER_THREAD = 32  # numbers of a part, twice: this one and the next
REGISTERS = 128  # of a thread: two programs run at once
PROGRAMS = 264  # at most: as many as run at once


def mix_decodes(call: DeltaCall) -> None:
    """Compute the sequences of one row, and update their states. Decays are one for each head."""
    form, meta, state, sizes = call.form, call.meta, call.state, call.sizes
    num_seqs, in_pdl = len(meta.slots), pdl.in_use()
    part = min(PART, sizes["DVP"])
    warps = max(1, min(8, sizes["DKP"] * part // (32 * PER_THREAD)))
    made = meta.plans.get(key := ("delta decodes", num_seqs))
    if not isinstance(made, tuple):
        counts = torch.zeros(num_seqs, form.key_heads + form.heads, dtype=torch.int32, device=call.y.device)
        parts = torch.empty(num_seqs, form.heads, form.value_dim, dtype=torch.float32, device=call.y.device)
        meta.plans[key] = made = counts, parts
    parts = num_seqs * form.heads * (sizes["DVP"] // part)
    each = -(-parts // PROGRAMS)
    _decode_kernel[(-(-parts // each),)](
        *call.inputs,
        *call.weights_of,
        *call.places,
        state.columns,
        state.matrix,
        call.y,
        *made,
        *call.strides,
        form.eps,
        form.lowest,
        num_seqs,
        each,
        **sizes,
        PART=part,
        PDL=in_pdl,
        num_warps=warps,
        **({"maxnreg": REGISTERS} if REGISTERS and not INTERPRETED else {}),
        **pdl.options(in_pdl),
    )


@jit
def _part_of(n, places, G: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr):
    """Return where part n is: its sequence, head, part of the head, row in the step, slot and length before the row.

    Rows of sequences that have no row, or several, are negative. places: query_start, seq_lens, slots
    """
    query_start, seq_lens, slots = places
    s, head, part = n // (H * PARTS), n // PARTS % H, n % PARTS
    row = tl.load(query_start + s)
    one = tl.load(query_start + s + 1) == row + 1
    return s, head, part, tl.where(one, row, -1), tl.load(slots + s).to(tl.int64), tl.load(seq_lens + s) - 1


@jit
def _read(
    n,
    places,
    matrix,
    stride,
    key,
    value,
    sizes,
    G: tl.constexpr,
    H: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """Return the matrix of part n; zeros before a sequence's first token. sizes: of keys and values of a head."""
    s, head, part, row, slot, past = _part_of(n, places, G, H, PARTS)
    own = part * PART + value
    inside = (key < sizes[0])[:, None] & (own < sizes[1])[None, :] & (past > 0) & (row >= 0)
    at = head * sizes[0] * sizes[1] + key[:, None] * sizes[1] + own[None, :]
    return tl.load(matrix + slot * stride + at, mask=inside, other=0.0)


@jit(do_not_specialize=["num_seqs", "each"])
def _decode_kernel(
    qkv,
    gate,
    decay,
    strength,
    conv,
    rate,
    shift,
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
    qkv_stride,
    gate_stride,
    decay_stride,
    strength_stride,
    columns_stride,
    matrix_stride,
    eps,
    lowest,
    num_seqs,
    each,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    TAPS: tl.constexpr,
    TAPSP: tl.constexpr,
    BOUNDED: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLED: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the rows of the sequences that have one. A program has `each` parts of PART values of a head. Grid (.,).

    counts   [sequences, G + H] int32 zeros: programs of a key head that have read its columns, and of a head that have
             written their part of its result. They are zeros afterwards
    parts    [sequences, H, DV] float32: the result of a head before its norm
    For the other parameters see `_rows_kernel` of `quire.kernels.delta.triton`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    PARTS: tl.constexpr = DVP // PART
    PER: tl.constexpr = H // G
    CHANNELS: tl.constexpr = 2 * G * DK + H * DV
    places, size = (query_start, seq_lens, slots), (DK, DV)
    key, span = tl.arange(0, DKP), tl.arange(0, PART)
    in_key = key < DK
    begin = tl.program_id(0) * each
    end = tl.minimum(begin + each, num_seqs * (H * PARTS))
    following = _read(begin, places, matrix, matrix_stride, key, span, size, G, H, PARTS, PART)
    for n in range(begin, end):
        held = following
        last = tl.minimum(n + 1, end - 1)
        following = _read(last, places, matrix, matrix_stride, key, span, size, G, H, PARTS, PART)
        s, head, part, at_row, slot, past = _part_of(n, places, G, H, PARTS)
        if at_row >= 0:
            row, key_head, value = at_row.to(tl.int64), head // PER, part * PART + span
            in_value = value < DV
            inside, at = in_key[:, None] & in_value[None, :], head * DK * DV + key[:, None] * DV + value[None, :]
            own, given = columns + slot * columns_stride, qkv + row * qkv_stride
            q_at, k_at, v_at = key_head * DK + key, (G + key_head) * DK + key, 2 * G * DK + head * DV + value
            # Queries and keys together: loads of a number for each thread stay in one layout, smaller ones are done by
            # all.
            is_key = tl.arange(0, 2)[:, None]
            both_at, in_both = (is_key * G + key_head) * DK + key[None, :], in_key[None, :] & (is_key < 2)
            both = unit(given, own, conv, 0, past, both_at, in_both, 1.0, CHANNELS, TAPS, qkv_stride, True, 1)
            q = tl.sum(tl.where(is_key == 0, both * DK**-0.5, 0.0), 0)
            k = tl.sum(tl.where(is_key == 1, both, 0.0), 0)
            v = convolved(given, own, conv, 0, past, v_at, in_value, CHANNELS, TAPS, qkv_stride, True)
            raw = tl.load(decay + row * decay_stride + head).to(tl.float32) + tl.load(shift + head)
            fade = tl.exp(log_decay(raw, tl.exp(tl.load(rate + head)), lowest, BOUNDED))
            b = tl.sigmoid(tl.load(strength + row * strength_stride + head).to(tl.float32)) * (2.0 if DOUBLED else 1.0)
            for copy in tl.static_range(2):
                if tl.load(kept_at + 2 * slot + copy) == past + 1:
                    copied = columns + tl.load(kept + 2 * slot + copy).to(tl.int64) * columns_stride
                    keep_columns(given, own, copied, 1, past, v_at, in_value, CHANNELS, TAPS, TAPSP, qkv_stride)
                    if (head % PER == 0) & (part == 0):
                        keep_columns(given, own, copied, 1, past, q_at, in_key, CHANNELS, TAPS, TAPSP, qkv_stride)
                        keep_columns(given, own, copied, 1, past, k_at, in_key, CHANNELS, TAPS, TAPSP, qkv_stride)
            keep_columns(given, own, own, 1, past, v_at, in_value, CHANNELS, TAPS, TAPSP, qkv_stride)
            tl.debug_barrier()  # all threads have read the columns of queries and keys
            readers = counts + s * (G + H) + key_head
            if tl.atomic_add(readers, 1, sem="acq_rel") == PER * PARTS - 1:
                tl.store(readers, 0)
                keep_columns(given, own, own, 1, past, q_at, in_key, CHANNELS, TAPS, TAPSP, qkv_stride)
                keep_columns(given, own, own, 1, past, k_at, in_key, CHANNELS, TAPS, TAPSP, qkv_stride)
            # Both sums read the matrix before its update, so the second does not wait for the first.
            said, read = fade * tl.sum(held * k[:, None], 0), fade * tl.sum(held * q[:, None], 0)
            wrong = b * (v - said)
            result = parts + (s * H + head) * DV
            tl.store(result + value, read + tl.sum(k * q) * wrong, mask=in_value)
            held = held * fade + k[:, None] * wrong[None, :]
            for copy in tl.static_range(2):
                if tl.load(kept_at + 2 * slot + copy) == past + 1:
                    target = tl.load(kept + 2 * slot + copy).to(tl.int64)
                    tl.store(matrix + target * matrix_stride + at, held, mask=inside)
            tl.store(matrix + slot * matrix_stride + at, held, mask=inside)
            tl.debug_barrier()  # all threads have written their part
            writers = counts + s * (G + H) + G + head
            if tl.atomic_add(writers, 1, sem="acq_rel") == PARTS - 1:
                tl.store(writers, 0)
                every = tl.arange(0, DVP)
                o = tl.load(result + every, mask=every < DV, other=0.0, cache_modifier=".cg")
                z = tl.load(gate + row * gate_stride + head * DV + every, mask=every < DV, other=0.0).to(tl.float32)
                scale = tl.load(norm + every, mask=every < DV, other=0.0) * opened(z, SIGMOID)
                o *= tl.rsqrt(tl.sum(o * o) / DV + eps) * scale
                tl.store(y + row * (H * DV) + head * DV + every, o.to(y.dtype.element_ty), mask=every < DV)
