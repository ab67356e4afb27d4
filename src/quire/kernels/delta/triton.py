"""The gated delta rule on a GPU: decodes of one row by `triton_decode.py`, drafts here, prompts by `triton_prompts.py`.

Drafts are one launch, in which a program has a head of a sequence and keeps its matrix in registers, from its one read
to its one write. Programs of a key head read the same columns of queries and keys. The last one to arrive writes the
new columns, when all have read the old ones.

Floor: 8 Hv Dk Dv bytes a sequence and layer, the matrices read and written once. 32 sequences with 32 heads of
128 x 128 move 134 MB: 31 us at 4.3 TB/s.

Sequences whose decays differ by channel are computed here, row by row: the products of a chunk would need a decay for
each pair of rows and channel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import pdl
from quire.kernels.delta import DeltaForm, DeltaWeights
from quire.kernels.delta.triton_decode import mix_decodes
from quire.kernels.delta.triton_prompts import DeltaCall, mix_prompts
from quire.kernels.delta.triton_rows import log_decay, opened, unit
from quire.kernels.state_rows import convolved, keep_columns
from quire.kernels.states import StateMeta, StateView, packed
from quire.kernels.triton_runtime import INTERPRETED, jit, tl


def mix(
    qkv: Tensor,
    gate: Tensor,
    decay: Tensor,
    strength: Tensor,
    weights: DeltaWeights,
    state: StateView,
    meta: StateMeta,
    form: DeltaForm,
) -> Tensor:
    """Return y [T, H * Dv], and update the states. See `quire.kernels.delta`. Rows of no sequence are not written."""
    rows = tuple(one if one.stride(-1) == 1 or one.shape[-1] == 1 else one.contiguous() for one in (qkv, gate, decay))
    strength = strength if strength.stride(-1) == 1 or strength.shape[-1] == 1 else strength.contiguous()
    _check(qkv, weights, state, form)
    call = DeltaCall(*rows, strength, weights, state, meta, form, qkv.new_empty(len(qkv), form.heads * form.value_dim))
    if not len(qkv):
        return call.y
    by_channel = len(weights.shift) != form.heads
    limit = meta.max_rows if by_channel else meta.decode_rows
    if limit == 1 and not by_channel:
        mix_decodes(call)
    elif limit:
        _mix_rows(call, limit, by_channel)
    if meta.max_rows > limit:
        mix_prompts(call)
    return call.y


def _check(qkv: Tensor, weights: DeltaWeights, state: StateView, form: DeltaForm) -> None:
    """Raise ValueError for states and weights that the kernels would read wrongly."""
    matrix, columns = state.matrix, state.columns
    assert matrix is not None, "the layer keeps matrices"
    shape = form.heads, form.key_dim, form.value_dim
    if matrix.dtype != torch.float32 or matrix.shape[1:] != shape or not packed(matrix):
        raise ValueError(
            f"triton delta: matrices must be float32 {shape}, contiguous in a state; they are {matrix.dtype} "
            f"{tuple(matrix.shape)} with strides {matrix.stride()}"
        )
    own = len(weights.conv) - 1, form.channels
    if columns.dtype != qkv.dtype or columns.shape[1:] != own or not packed(columns):
        raise ValueError(
            f"triton delta: columns must be {qkv.dtype} {own}, contiguous in a state; they are {columns.dtype} "
            f"{tuple(columns.shape)} with strides {columns.stride()}"
        )


def _mix_rows(call: DeltaCall, limit: int, by_channel: bool) -> None:
    """Launch the kernel for sequences of at most `limit` rows."""
    form, meta, state = call.form, call.meta, call.state
    num_seqs, in_pdl = len(meta.slots), pdl.in_use()
    key_dim, value_dim = call.sizes["DKP"], call.sizes["DVP"]
    warps = max(1, min(8, key_dim * value_dim // 1024, key_dim // 16))
    held = (
        key_dim * value_dim // (32 * warps)
    )  # numbers of the matrix in a thread, whose registers let two programs run
    _rows_kernel[(form.heads, num_seqs)](
        *call.inputs,
        *call.weights_of,
        *call.places,
        state.columns,
        state.matrix,
        call.y,
        _counters(meta, num_seqs * form.key_heads, call.y.device),
        *call.strides,
        form.eps,
        form.lowest,
        limit,
        **call.sizes,
        BY_CHANNEL=by_channel,
        ONE=limit == 1,
        PDL=in_pdl,
        num_warps=warps,
        **pdl.options(in_pdl),
        **({"maxnreg": 128} if held <= 64 and not INTERPRETED else {}),
    )


def _counters(meta: StateMeta, count: int, device: torch.device) -> Tensor:
    """Return zeros, which every layer of the step leaves as zeros."""
    key = "delta arrivals", count
    found = meta.plans.get(key)
    if not isinstance(found, Tensor):
        meta.plans[key] = found = torch.zeros(count, dtype=torch.int32, device=device)
    return found


@jit
def _advance(
    held,
    decay,
    strength,
    shift,
    gate,
    norm,
    y,
    q,
    k,
    v,
    head,
    key,
    value,
    speed,
    lowest,
    eps,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BOUNDED: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLED: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):
    """Compute a row of a head: write its result, return the matrix after it. held: the matrix before.

    decay, strength, gate, y   the row
    key, value   arange of the padded sizes;  speed  exp(rate)
    """
    in_key, in_value = key < DK, value < DV
    if BY_CHANNEL:
        raw = tl.load(decay + head * DK + key, mask=in_key, other=0.0).to(tl.float32)
        raw += tl.load(shift + head * DK + key, mask=in_key, other=0.0)
    else:
        raw = tl.load(decay + head).to(tl.float32) + tl.load(shift + head)
    fade = tl.exp(log_decay(raw, speed, lowest, BOUNDED))
    b = tl.sigmoid(tl.load(strength + head).to(tl.float32))
    if DOUBLED:
        b *= 2
    z = tl.load(gate + head * DV + value, mask=in_value, other=0.0).to(tl.float32)
    scale = tl.load(norm + value, mask=in_value, other=0.0) * opened(z, SIGMOID)
    # Both sums read the matrix before its update, so the second does not wait for the first.
    if BY_CHANNEL:
        held *= fade[:, None]
        said, read = tl.sum(held * k[:, None], 0), tl.sum(held * q[:, None], 0)
    else:
        said, read = fade * tl.sum(held * k[:, None], 0), fade * tl.sum(held * q[:, None], 0)
        held *= fade
    wrong = b * (v - said)
    o = read + tl.sum(k * q) * wrong
    o *= tl.rsqrt(tl.sum(o * o) / DV + eps) * scale
    tl.store(y + head * DV + value, o.to(y.dtype.element_ty), mask=in_value)
    return held + k[:, None] * wrong[None, :]


@jit(do_not_specialize=["limit"])
def _rows_kernel(
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
    arrived,
    qkv_stride,
    gate_stride,
    decay_stride,
    strength_stride,
    columns_stride,
    matrix_stride,
    eps,
    lowest,
    limit,
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
    BY_CHANNEL: tl.constexpr,
    ONE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the rows of a sequence of at most `limit` rows, for a head. Grid (H, sequences).

    arrived         [sequences, G] int32 zeros: programs of a key head that have read its columns
    strides         from row to row, and from state to state, in elements
    DKP, DVP        DK and DV, padded to powers of two;  TAPSP  the number of columns, padded likewise
    BOUNDED         form.lowest is not 0;  ONE  limit is 1
    For the other parameters see `quire.kernels.delta` and `quire.kernels.states`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head, s = tl.program_id(0), tl.program_id(1)
    first = tl.load(query_start + s)
    rows = tl.load(query_start + s + 1) - first
    if (rows <= 0) | (rows > limit):
        return
    PER: tl.constexpr = H // G
    CHANNELS: tl.constexpr = 2 * G * DK + H * DV
    key_head = head // PER
    past = tl.load(seq_lens + s) - rows
    slot = tl.load(slots + s).to(tl.int64)
    key, value = tl.arange(0, DKP), tl.arange(0, DVP)
    in_key, in_value = key < DK, value < DV
    inside, at = in_key[:, None] & in_value[None, :], head * DK * DV + key[:, None] * DV + value[None, :]
    held = tl.load(matrix + slot * matrix_stride + at, mask=inside & (past > 0), other=0.0)
    own, given = columns + slot * columns_stride, qkv + first.to(tl.int64) * qkv_stride
    q_at, k_at, v_at = key_head * DK + key, (G + key_head) * DK + key, 2 * G * DK + head * DV + value
    # Queries and keys together: loads of a number for each thread stay in one layout, smaller ones are done by all.
    is_key = tl.arange(0, 2)[:, None]
    both_at, in_both, factor = (is_key * G + key_head) * DK + key[None, :], in_key[None, :] & (is_key < 2), DK**-0.5
    speed = tl.exp(tl.load(rate + head))
    for i in range(0, 1 if ONE else rows):
        both = unit(given, own, conv, i, past, both_at, in_both, 1.0, CHANNELS, TAPS, qkv_stride, ONE, 1)
        q, k = tl.sum(tl.where(is_key == 0, both * factor, 0.0), 0), tl.sum(tl.where(is_key == 1, both, 0.0), 0)
        v = convolved(given, own, conv, None, i, past, v_at, in_value, CHANNELS, TAPS, qkv_stride, ONE)
        row = (first + i).to(tl.int64)
        held = _advance(
            held,
            decay + row * decay_stride,
            strength + row * strength_stride,
            shift,
            gate + row * gate_stride,
            norm,
            y + row * (H * DV),
            q,
            k,
            v,
            head,
            key,
            value,
            speed,
            lowest,
            eps,
            DK,
            DV,
            BOUNDED,
            SIGMOID,
            DOUBLED,
            BY_CHANNEL,
        )
        for n in range(0, 2):
            length = tl.load(kept_at + 2 * slot + n)
            if length == past + i + 1:
                target = tl.load(kept + 2 * slot + n).to(tl.int64)
                copied = columns + target * columns_stride
                tl.store(matrix + target * matrix_stride + at, held, mask=inside)
                keep_columns(given, own, copied, i + 1, past, v_at, in_value, CHANNELS, TAPS, TAPSP, qkv_stride)
                if head % PER == 0:
                    keep_columns(given, own, copied, i + 1, past, q_at, in_key, CHANNELS, TAPS, TAPSP, qkv_stride)
                    keep_columns(given, own, copied, i + 1, past, k_at, in_key, CHANNELS, TAPS, TAPSP, qkv_stride)
    tl.store(matrix + slot * matrix_stride + at, held, mask=inside)
    keep_columns(given, own, own, rows, past, v_at, in_value, CHANNELS, TAPS, TAPSP, qkv_stride)
    last = True
    if PER > 1:
        tl.debug_barrier()  # all threads have read the columns of queries and keys
        last = tl.atomic_add(arrived + s * G + key_head, 1, sem="acq_rel") == PER - 1
    if last:
        tl.store(arrived + s * G + key_head, 0)
        keep_columns(given, own, own, rows, past, q_at, in_key, CHANNELS, TAPS, TAPSP, qkv_stride)
        keep_columns(given, own, own, rows, past, k_at, in_key, CHANNELS, TAPS, TAPSP, qkv_stride)
