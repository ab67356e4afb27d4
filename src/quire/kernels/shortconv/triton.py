"""The short convolution on a GPU: decodes of one row in one launch; prompts in two, outputs before columns.

A program has some channels, of a sequence or of chunks of prompts. All is bound by memory. Where drafts are verified,
one launch does what `quire.kernels.states` says of pending rows, and prompts go on behind it.

Floor: 4 C numbers a row, 2 (K - 1) C numbers a sequence. 32 decodes of LFM2's 2048 channels move 1 MB, which takes
less time than a launch; 8192 tokens of a prompt move 134 MB: 31 us at 4.3 TB/s.
"""

from __future__ import annotations

from torch import Tensor

from quire.kernels import pdl
from quire.kernels.shortconv import ShortConvWeights
from quire.kernels.state_checks import check_states
from quire.kernels.state_chunks import CHUNK, planned
from quire.kernels.state_rows import counters, replayed_of, stand
from quire.kernels.states import StateMeta, StateView
from quire.kernels.triton_runtime import jit, tl

ONE_ROW, MANY_ROWS = 256, 64  # channels of a program


def mix(rows: Tensor, weights: ShortConvWeights, state: StateView, meta: StateMeta) -> Tensor:
    """Return y [T, C], and update the states. See `quire.kernels.shortconv`. Rows of no sequence are not written."""
    taps, channels = weights.conv.shape
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    y, columns, in_pdl = rows.new_empty(len(rows), channels), state.columns, pdl.in_use()
    limit = min(1, meta.decode_rows) if state.pending is None else state.pending.shape[1]
    check_states("shortconv", rows, state, (taps - 1, channels), (), channels)
    sequences = meta.query_start, meta.seq_lens, meta.slots
    copies = meta.kept_at, meta.kept
    sizes = {"CHANNELS": channels, "TAPS": taps, "TAPSP": 1 << max(0, taps - 2).bit_length()}
    strides = rows.stride(0), columns.stride(0)
    if len(rows) and state.pending is not None and state.at is not None:
        parts = -(-channels // MANY_ROWS)
        _rows_kernel[(parts, len(meta.slots))](
            rows,
            weights.conv,
            weights.bias,
            *sequences,
            *copies,
            columns,
            y,
            counters(meta, len(meta.slots)),
            state.pending,
            state.at,
            *strides,
            state.pending.stride(0),
            state.at.stride(0),
            **sizes,
            MOST=limit,
            PARTS=parts,
            BLOCK=MANY_ROWS,
            PDL=in_pdl,
            num_warps=1,
            **pdl.options(in_pdl),
        )
    elif len(rows) and limit:
        _decode_kernel[(-(-channels // ONE_ROW), len(meta.slots))](
            rows,
            weights.conv,
            weights.bias,
            *sequences,
            *copies,
            columns,
            y,
            *strides,
            **sizes,
            BLOCK=ONE_ROW,
            PDL=in_pdl,
            num_warps=4,
            **pdl.options(in_pdl),
        )
    if len(rows) and meta.max_rows > limit:
        plan, parts = planned(meta, len(rows), limit), -(-channels // MANY_ROWS)
        _chunks_kernel[(parts, plan.chunk_programs)](
            rows,
            weights.conv,
            weights.bias,
            *plan[:2],
            *sequences,
            columns,
            y,
            *strides,
            CHANNELS=channels,
            TAPS=taps,
            CHUNK=CHUNK,
            BLOCK=MANY_ROWS,
            num_warps=4,
        )
        _columns_kernel[(parts, plan.seq_programs)](
            rows,
            plan.counts,
            plan.sequences,
            *sequences,
            *copies,
            columns,
            *strides,
            **sizes,
            BLOCK=MANY_ROWS,
            num_warps=1,
        )
    return y


@jit
def _product(given, i, channel, inside, CHANNELS: tl.constexpr, stride):
    """Return v of rows i of the step. given: the sequence's first row"""
    given += tl.cast(i, tl.int64) * stride
    b = tl.load(given + channel, mask=inside, other=0.0)
    x = tl.load(given + 2 * CHANNELS + channel, mask=inside, other=0.0)
    return (b.to(tl.float32) * x.to(tl.float32)).to(b.dtype)


@jit
def _taken(
    given,
    columns,
    i,
    past,
    channel,
    inside,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    stride,
    pending=None,
    replayed=0,
):
    """Return v of rows i, of which negative ones are columns; zeros before the sequence's first token.

    pending   pending rows of the sequence's state. Rows count from the first of `replayed` ones; None: there are none
    """
    place = columns + (i + TAPS - 1) * CHANNELS + channel
    if pending is not None:
        place = tl.where(i >= 0, pending + i * CHANNELS + channel, place)
    before = tl.load(place, mask=inside & (i < replayed) & (past > 0), other=0.0)
    new = _product(given, i - replayed, channel, inside & (i >= replayed), CHANNELS, stride)
    return tl.where(i >= replayed, new, before)


@jit
def _keep(
    given,
    columns,
    target,
    upto,
    past,
    channel,
    inside,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    TAPSP: tl.constexpr,
    stride,
    pending=None,
    replayed=0,
):
    """Write the sequence's columns after `upto` rows to `target`, which may be `columns`. See `_taken`."""
    tap = tl.arange(0, TAPSP)[:, None]
    within = (tap < TAPS - 1) & inside[None, :]
    row, at = upto - TAPS + 1 + tap, channel[None, :]
    v = _taken(given, columns, row, past, at, within, CHANNELS, TAPS, stride, pending, replayed)
    tl.debug_barrier()  # all reads of the program are done
    tl.store(target + tap * CHANNELS + channel[None, :], v, mask=within)


@jit
def _decode_kernel(
    rows,
    conv,
    bias,
    query_start,
    seq_lens,
    slots,
    kept_at,
    kept,
    columns,
    y,
    stride,
    columns_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    TAPSP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the row of a sequence that has one, for BLOCK channels. Grid (ceil(C / BLOCK), sequences).

    stride, columns_stride   from row to row, and from state to state, in elements
    TAPSP                    number of columns, padded to a power of two
    For the other parameters see `quire.kernels.shortconv` and `quire.kernels.states`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    s = tl.program_id(1)
    row = tl.load(query_start + s).to(tl.int64)
    if tl.load(query_start + s + 1) != row + 1:
        return
    past, slot = tl.load(seq_lens + s) - 1, tl.load(slots + s).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    own, given = columns + slot * columns_stride, rows + row * stride
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        if tap == TAPS - 1:
            v = _product(given, 0, channel, inside, CHANNELS, stride)
        else:
            v = tl.load(own + tap * CHANNELS + channel, mask=inside & (past > 0), other=0.0)
        total += v.to(tl.float32) * tl.load(conv + tap * CHANNELS + channel, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0.0)
    c = tl.load(given + CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * CHANNELS + channel, (c * total).to(y.dtype.element_ty), mask=inside)
    for k in tl.static_range(2):
        if tl.load(kept_at + 2 * slot + k) == past + 1:
            copied = columns + tl.load(kept + 2 * slot + k).to(tl.int64) * columns_stride
            _keep(given, own, copied, 1, past, channel, inside, CHANNELS, TAPS, TAPSP, stride)
    _keep(given, own, own, 1, past, channel, inside, CHANNELS, TAPS, TAPSP, stride)


@jit
def _rows_kernel(
    rows,
    conv,
    bias,
    query_start,
    seq_lens,
    slots,
    kept_at,
    kept,
    columns,
    y,
    arrived,
    pending,
    lengths,
    stride,
    columns_stride,
    pending_stride,
    lengths_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    TAPSP: tl.constexpr,
    MOST: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the rows of a sequence of at most MOST ones, for BLOCK channels. Grid (PARTS, sequences).

    arrived            [sequences] int32 zeros: programs that have read the sequence's length. Zeros afterwards
    pending, lengths   `StateView.pending` and `at`, with MOST pending rows. A longer sequence is replayed alone
    For the other parameters see `_decode_kernel`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    s = tl.program_id(1)
    first = tl.load(query_start + s)
    count = tl.load(query_start + s + 1) - first
    if count <= 0:
        return
    past, slot = tl.load(seq_lens + s) - count, tl.load(slots + s).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, lazy = channel < CHANNELS, count <= MOST
    own, given = columns + slot * columns_stride, rows + first.to(tl.int64) * stride
    put_off = pending + slot * pending_stride
    replayed = replayed_of(lengths + slot * lengths_stride, past, MOST)
    for i in range(0, tl.where(lazy, count, 0)):
        j, row = i + replayed, (first + i).to(tl.int64)
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(TAPS):
            at = j + (tap - TAPS + 1)
            v = _taken(given, own, at, past, channel, inside, CHANNELS, TAPS, stride, put_off, replayed)
            total += v.to(tl.float32) * tl.load(conv + tap * CHANNELS + channel, mask=inside, other=0.0)
        if bias is not None:
            total += tl.load(bias + channel, mask=inside, other=0.0)
        c = tl.load(given + tl.cast(i, tl.int64) * stride + CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + row * CHANNELS + channel, (c * total).to(y.dtype.element_ty), mask=inside)
        for k in range(0, 2):
            if tl.load(kept_at + 2 * slot + k) == past + i + 1:
                copied = columns + tl.load(kept + 2 * slot + k).to(tl.int64) * columns_stride
                _keep(
                    given, own, copied, j + 1, past, channel, inside, CHANNELS, TAPS, TAPSP, stride, put_off, replayed
                )
    _keep(given, own, own, replayed, past, channel, inside, CHANNELS, TAPS, TAPSP, stride, put_off, replayed)
    if lazy:
        for i in range(0, count):
            v = _product(given, i, channel, inside, CHANNELS, stride)
            tl.store(put_off + i * CHANNELS + channel, v, mask=inside)
    stand(arrived + s, (kept_at, kept, lengths, lengths_stride), slot, past, count, lazy, PARTS)


@jit
def _chunks_kernel(
    rows,
    conv,
    bias,
    counts,
    chunks,
    query_start,
    seq_lens,
    slots,
    columns,
    y,
    stride,
    columns_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute rows of chunks, for BLOCK channels. Grid (ceil(C / BLOCK), programs). See `Chunks`, `_decode_kernel`."""
    flat, channel = tl.arange(0, CHUNK)[:, None], (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    for n in range(tl.program_id(1), tl.load(counts), tl.num_programs(1)):
        row, count = tl.load(chunks + 4 * n).to(tl.int64), tl.load(chunks + 4 * n + 1)
        s, before = tl.load(chunks + 4 * n + 2), tl.load(chunks + 4 * n + 3)
        first = tl.load(query_start + s)
        past = tl.load(seq_lens + s) - (tl.load(query_start + s + 1) - first)
        own = columns + tl.load(slots + s).to(tl.int64) * columns_stride
        given, i, inside = rows + first.to(tl.int64) * stride, before + flat, (flat < count) & (channel < CHANNELS)
        total = tl.zeros([CHUNK, BLOCK], tl.float32)
        for tap in tl.static_range(TAPS):
            v = _taken(given, own, i + (tap - TAPS + 1), past, channel, inside, CHANNELS, TAPS, stride)
            total += v.to(tl.float32) * tl.load(conv + tap * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)
        if bias is not None:
            total += tl.load(bias + channel, mask=channel < CHANNELS, other=0.0)
        c = tl.load(given + tl.cast(i, tl.int64) * stride + CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + row * CHANNELS + (flat * CHANNELS + channel), (c * total).to(y.dtype.element_ty), mask=inside)


@jit
def _columns_kernel(
    rows,
    counts,
    sequences,
    query_start,
    seq_lens,
    slots,
    kept_at,
    kept,
    columns,
    stride,
    columns_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    TAPSP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the columns and copies of sequences with chunks, for BLOCK channels. Grid (ceil(C / BLOCK), programs)."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    for p in range(tl.program_id(1), tl.load(counts + 1), tl.num_programs(1)):
        s = tl.load(sequences + 4 * p)
        first, end = tl.load(query_start + s), tl.load(seq_lens + s)
        past, slot = end - (tl.load(query_start + s + 1) - first), tl.load(slots + s).to(tl.int64)
        own, given = columns + slot * columns_stride, rows + first.to(tl.int64) * stride
        for copy in range(0, 3):
            length, target = end, slot  # the state itself comes last
            if copy < 2:
                length = tl.load(kept_at + 2 * slot + copy)
                target = tl.load(kept + 2 * slot + copy).to(tl.int64)
            if (length > past) & (length <= end):
                to = columns + target * columns_stride
                _keep(given, own, to, length - past, past, channel, inside, CHANNELS, TAPS, TAPSP, stride)
