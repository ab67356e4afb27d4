"""The gated delta rule on a GPU: decodes of one row by `triton_decode.py`, drafts here, prompts by `triton_prompts.py`.

Drafts are one launch, in which a program has a head of a sequence and keeps its matrix in registers, from its one read
to its one write. Programs of a key head read the same columns of queries and keys. The last one to arrive writes the
new columns, when all have read the old ones. With pending rows (`quire.kernels.states`) a program first replays those
that were accepted, and writes the matrix then. Sequences of longer chunks are replayed here, too, before the kernels
for prompts go on.

Decodes whose decays differ by channel are computed here, too.

Floor: 8 Hv Dk Dv bytes a sequence and layer, the matrices read and written once. 32 sequences with 32 heads of
128 x 128 move 134 MB: 31 us at 4.3 TB/s.
"""

from __future__ import annotations

from torch import Tensor

from quire.kernels import pdl
from quire.kernels.delta import DeltaForm, DeltaWeights
from quire.kernels.delta.triton_decode import mix_decodes
from quire.kernels.delta.triton_prompts import DeltaCall, mix_prompts
from quire.kernels.delta.triton_rows import columns_of_head, log_decay, opened, row_of_head
from quire.kernels.state_checks import check_states
from quire.kernels.state_rows import counters, keep_rows, replayed_of, stand
from quire.kernels.states import StateMeta, StateView
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
    sizes = form.heads, form.key_dim, form.value_dim
    width = form.channels + len(weights.shift) + form.heads
    check_states("delta", qkv, state, (len(weights.conv) - 1, form.channels), sizes, width)
    call = DeltaCall(*rows, strength, weights, state, meta, form, qkv.new_empty(len(qkv), form.heads * form.value_dim))
    if not len(qkv):
        return call.y
    limit = meta.decode_rows
    if state.pending is not None and meta.max_rows > limit != state.pending.shape[1]:
        raise ValueError(f"triton delta: {limit} rows of decodes, and {state.pending.shape[1]} pending ones")
    if limit == 1 and not call.by_channel and state.pending is None:
        mix_decodes(call)
    elif limit:
        _mix_rows(call, limit)
    if meta.max_rows > limit:
        mix_prompts(call)
    return call.y


def _mix_rows(call: DeltaCall, limit: int) -> None:
    """Launch the kernel for sequences of at most `limit` rows."""
    form, meta, state = call.form, call.meta, call.state
    num_seqs, in_pdl = len(meta.slots), pdl.in_use()
    key_dim, value_dim = call.sizes["DKP"], call.sizes["DVP"]
    warps = max(1, min(8, key_dim * value_dim // 1024, key_dim // 16))
    held = key_dim * value_dim // (32 * warps)  # numbers of the matrix in a thread; its registers let two programs run
    _rows_kernel[(form.heads, num_seqs)](
        *call.inputs,
        *call.weights_of,
        *call.places,
        state.columns,
        state.matrix,
        call.y,
        counters(meta, num_seqs * (form.key_heads + 1)),
        state.pending,
        state.at,
        *call.strides,
        *(0 if one is None else one.stride(0) for one in (state.pending, state.at)),
        form.eps,
        form.lowest,
        limit,
        **call.sizes,
        BY_CHANNEL=call.by_channel,
        MOST=0 if state.pending is None else state.pending.shape[1],
        ONE=limit == 1 and state.pending is None,
        PDL=in_pdl,
        num_warps=warps,
        **pdl.options(in_pdl),
        **({"maxnreg": 128} if held <= 64 and not INTERPRETED else {}),
    )


@jit
def _advance(
    held,
    rates,
    factors,
    outputs,
    row,
    place,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BOUNDED: tl.constexpr,
    SIGMOID: tl.constexpr,
    DOUBLED: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    READ: tl.constexpr,
):
    """Compute a row of a head: write its result if READ, return the matrix after it. held: the matrix before.

    rates     rows of decays and strengths;  row  q, k and v of the head
    factors   shift, exp(rate) and lowest
    outputs   rows of gate, norm and y, and eps
    place     head, and arange of the padded sizes of a key and a value
    """
    head, key, value = place
    decay, strength = rates
    shift, speed, lowest = factors
    gate, norm, y, eps = outputs
    q, k, v = row
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
    # Both sums read the matrix before its update, so the second does not wait for the first.
    if BY_CHANNEL:
        held *= fade[:, None]
        said, read = tl.sum(held * k[:, None], 0), tl.sum(held * q[:, None], 0)
    else:
        said, read = fade * tl.sum(held * k[:, None], 0), fade * tl.sum(held * q[:, None], 0)
        held *= fade
    wrong = b * (v - said)
    if READ:
        z = tl.load(gate + head * DV + value, mask=in_value, other=0.0).to(tl.float32)
        scale = tl.load(norm + value, mask=in_value, other=0.0) * opened(z, SIGMOID)
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
    pending,
    lengths,
    qkv_stride,
    gate_stride,
    decay_stride,
    strength_stride,
    columns_stride,
    matrix_stride,
    pending_stride,
    lengths_stride,
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
    MOST: tl.constexpr,
    ONE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the rows of a sequence of at most `limit` rows, for a head. Grid (H, sequences).

    arrived         [sequences, G + 1] int32 zeros: programs of a key head that have read its columns; at last those
                    that have read the sequence's length
    pending, lengths   `StateView.pending` and `at`, with MOST pending rows; MOST is 0: None. With them, a longer
                    sequence is replayed
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
    if (rows <= 0) | ((rows > limit) & (MOST == 0)):
        return
    DECAYS: tl.constexpr = H * DK if BY_CHANNEL else H
    CHANNELS: tl.constexpr = 2 * G * DK + H * DV
    WIDTH: tl.constexpr = CHANNELS + DECAYS + H
    past = tl.load(seq_lens + s) - rows
    slot = tl.load(slots + s).to(tl.int64)
    key, value = tl.arange(0, DKP), tl.arange(0, DVP)
    inside = (key < DK)[:, None] & (value < DV)[None, :]
    at = head * DK * DV + key[:, None] * DV + value[None, :]
    held = tl.load(matrix + slot * matrix_stride + at, mask=inside & (past > 0), other=0.0).to(tl.float32)
    own, given = columns + slot * columns_stride, qkv + first.to(tl.int64) * qkv_stride
    place, factors = (head, key, value), (shift, tl.exp(tl.load(rate + head)), lowest)
    replayed, count, put_off = 0, rows, None
    if MOST:
        put_off = pending + slot * pending_stride
        replayed = replayed_of(lengths + slot * lengths_stride, past, MOST)
        count = tl.where(rows > limit, 0, rows)
    source = (given, own, past, qkv_stride, put_off, replayed)
    if MOST:
        for i in range(0, replayed):
            row = row_of_head(source, conv, i, head, key, value, G, H, DK, DV, TAPS, ONE, WIDTH)
            rates = (put_off + i * WIDTH + CHANNELS, put_off + i * WIDTH + CHANNELS + DECAYS)
            outputs = (gate, norm, y, eps)
            held = _advance(
                held, rates, factors, outputs, row, place, DK, DV, BOUNDED, SIGMOID, DOUBLED, BY_CHANNEL, False
            )
            held = held.to(matrix.dtype.element_ty).to(tl.float32)  # as decodes of one row would leave it
        if (rows <= MOST) | (count == 0):
            tl.store(matrix + slot * matrix_stride + at, held.to(matrix.dtype.element_ty), mask=inside)
    for i in range(0, 1 if ONE else count):
        j, at_row = i + replayed, (first + i).to(tl.int64)
        row = row_of_head(source, conv, j, head, key, value, G, H, DK, DV, TAPS, ONE, WIDTH)
        rates = (decay + at_row * decay_stride, strength + at_row * strength_stride)
        outputs = (gate + at_row * gate_stride, norm, y + at_row * (H * DV), eps)
        held = _advance(held, rates, factors, outputs, row, place, DK, DV, BOUNDED, SIGMOID, DOUBLED, BY_CHANNEL, True)
        held = held.to(matrix.dtype.element_ty).to(tl.float32)
        for n in range(0, 2):
            length = tl.load(kept_at + 2 * slot + n)
            if length == past + i + 1:
                target = tl.load(kept + 2 * slot + n).to(tl.int64)
                copied = columns + target * columns_stride
                tl.store(matrix + target * matrix_stride + at, held.to(matrix.dtype.element_ty), mask=inside)
                columns_of_head(source, copied, j + 1, head, value, True, G, H, DK, DV, TAPS, TAPSP, WIDTH)
                if head % (H // G) == 0:
                    columns_of_head(source, copied, j + 1, head, key, False, G, H, DK, DV, TAPS, TAPSP, WIDTH)
    lazy = rows <= MOST
    upto = tl.where(lazy, replayed, replayed + count)
    if (MOST == 0) | ((count > 0) & (rows > MOST)):
        tl.store(matrix + slot * matrix_stride + at, held.to(matrix.dtype.element_ty), mask=inside)
    columns_of_head(source, own, upto, head, value, True, G, H, DK, DV, TAPS, TAPSP, WIDTH)
    if MOST:
        if lazy:
            keep_rows(given, put_off, rows, 2 * G * DK + head * DV + value, value < DV, qkv_stride, WIDTH)
            decays, own_decay = decay + first.to(tl.int64) * decay_stride, head
            in_decay = None
            if BY_CHANNEL:
                own_decay, in_decay = head * DK + key, key < DK
            keep_rows(decays, put_off + CHANNELS, rows, own_decay, in_decay, decay_stride, WIDTH)
            strengths = strength + first.to(tl.int64) * strength_stride
            keep_rows(strengths, put_off + CHANNELS + DECAYS, rows, head, None, strength_stride, WIDTH)
        stand(arrived + tl.num_programs(1) * G + s, (kept_at, kept, lengths, lengths_stride), slot, past, rows, lazy, H)
    last = True
    if H > G:
        tl.debug_barrier()  # all threads have read the columns of queries and keys
        last = tl.atomic_add(arrived + s * G + head // (H // G), 1, sem="acq_rel") == H // G - 1
    if last:
        tl.store(arrived + s * G + head // (H // G), 0)
        columns_of_head(source, own, upto, head, key, False, G, H, DK, DV, TAPS, TAPSP, WIDTH)
        if MOST:
            if lazy:
                for side in tl.static_range(2):
                    shared = (side * G + head // (H // G)) * DK + key
                    keep_rows(given, put_off, rows, shared, key < DK, qkv_stride, WIDTH)
