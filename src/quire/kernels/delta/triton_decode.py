"""Decodes of one row by the gated delta rule, in one launch: each program has a part of the values of a head.

A program keeps its part of the matrix in registers, from its one read to its one write. It hides the latency of its own
first loads by little, so small programs, of which many run at once, are faster than one for each head. Programs that
share columns of queries and keys, or the norm of a head, count their arrivals: the last one to arrive writes the new
columns, when all have read the old ones, and the last one of a head norms and gates its result.

Floor: 8 Dk Dv bytes a decode and head, the matrix read and written once.
"""

from __future__ import annotations

import torch

from quire.kernels import pdl
from quire.kernels.delta.triton_prompts import DeltaCall
from quire.kernels.delta.triton_rows import log_decay, opened, unit
from quire.kernels.state_rows import convolved, keep_columns
from quire.kernels.triton_runtime import jit, tl

PART = 64  # most values of a program
PER_THREAD = 64  # numbers of the matrix


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
    _decode_kernel[(form.heads * (sizes["DVP"] // part), num_seqs)](
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
        **sizes,
        PART=part,
        PDL=in_pdl,
        num_warps=warps,
        **pdl.options(in_pdl),
    )


@jit
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
    """Compute the row of a sequence that has one, for PART values of a head. Grid (H * DVP / PART, sequences).

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
    head, s = tl.program_id(0) // PARTS, tl.program_id(1)
    row = tl.load(query_start + s).to(tl.int64)
    if tl.load(query_start + s + 1) != row + 1:
        return
    key_head, past, slot = head // PER, tl.load(seq_lens + s) - 1, tl.load(slots + s).to(tl.int64)
    key, value = tl.arange(0, DKP), tl.program_id(0) % PARTS * PART + tl.arange(0, PART)
    in_key, in_value = key < DK, value < DV
    inside, at = in_key[:, None] & in_value[None, :], head * DK * DV + key[:, None] * DV + value[None, :]
    held = tl.load(matrix + slot * matrix_stride + at, mask=inside & (past > 0), other=0.0).to(tl.float32)
    keep = tl.load(kept_at + 2 * slot), tl.load(kept_at + 2 * slot + 1)
    own, given = columns + slot * columns_stride, qkv + row * qkv_stride
    q_at, k_at, v_at = key_head * DK + key, (G + key_head) * DK + key, 2 * G * DK + head * DV + value
    # Queries and keys together: loads of a number for each thread stay in one layout, smaller ones are done by all.
    is_key = tl.arange(0, 2)[:, None]
    both_at, in_both = (is_key * G + key_head) * DK + key[None, :], in_key[None, :] & (is_key < 2)
    both = unit(given, own, conv, 0, past, both_at, in_both, 1.0, CHANNELS, TAPS, qkv_stride, True, 1)
    q = tl.sum(tl.where(is_key == 0, both * DK**-0.5, 0.0), 0)
    k = tl.sum(tl.where(is_key == 1, both, 0.0), 0)
    v = convolved(given, own, conv, None, 0, past, v_at, in_value, CHANNELS, TAPS, qkv_stride, True)
    raw = tl.load(decay + row * decay_stride + head).to(tl.float32) + tl.load(shift + head)
    fade = tl.exp(log_decay(raw, tl.exp(tl.load(rate + head)), lowest, BOUNDED))
    b = tl.sigmoid(tl.load(strength + row * strength_stride + head).to(tl.float32)) * (2.0 if DOUBLED else 1.0)
    for n in tl.static_range(2):
        if keep[n] == past + 1:
            copied = columns + tl.load(kept + 2 * slot + n).to(tl.int64) * columns_stride
            keep_columns(given, own, copied, 1, past, v_at, in_value, CHANNELS, TAPS, TAPSP, qkv_stride)
            if tl.program_id(0) % (PER * PARTS) == 0:
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
    for n in tl.static_range(2):
        if keep[n] == past + 1:
            target = tl.load(kept + 2 * slot + n).to(tl.int64)
            tl.store(matrix + target * matrix_stride + at, held.to(matrix.dtype.element_ty), mask=inside)
    tl.store(matrix + slot * matrix_stride + at, held.to(matrix.dtype.element_ty), mask=inside)
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
