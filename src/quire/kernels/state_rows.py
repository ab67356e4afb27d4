"""Parts of the kernels of recurrent layers on a GPU: convolution, columns, pending rows, rates, parts of matrices.

A layer's state has the last TAPS - 1 inputs of the convolution as columns. See `quire.kernels.states`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.states import StateMeta
from quire.kernels.triton_runtime import jit, tl


def counters(meta: StateMeta, count: int) -> Tensor:
    """Return int32 zeros, which every layer of the step leaves as zeros."""
    key = "arrivals", count
    found = meta.plans.get(key)
    if not isinstance(found, Tensor):
        meta.plans[key] = found = torch.zeros(count, dtype=torch.int32, device=meta.slots.device)
    return found


@jit
def taken(
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
    WIDTH: tl.constexpr = 0,
):
    """Return inputs of the convolution; those before the sequence's first token are zeros.

    given      the sequence's first row in the step;  stride  from row to row
    columns    [TAPS - 1, CHANNELS] of the sequence's state
    i          rows from the first one; a negative i is a column. past: the sequence's tokens before the step
    channel    channels; inside: those to load. i, channel and inside broadcast
    pending    pending rows of the sequence's state, of WIDTH numbers. Rows count from the first of `replayed` ones;
               None: there are none
    """
    place, known = columns + (i + TAPS - 1) * CHANNELS + channel, (i >= 0) | (past > 0)
    if pending is not None:
        place = tl.where(i >= 0, pending + i * WIDTH + channel, place)
    place = tl.where(i >= replayed, given + tl.cast(i - replayed, tl.int64) * stride + channel, place)
    return tl.load(place, mask=inside & known, other=0.0)


@jit
def convolved(
    given,
    columns,
    conv,
    bias,
    i,
    past,
    channel,
    inside,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    stride,
    ONE: tl.constexpr,
    pending=None,
    replayed=0,
    WIDTH: tl.constexpr = 0,
):
    """Return silu of the convolution of channels at rows i, in float32.

    conv, bias   [TAPS, CHANNELS], and [CHANNELS] or None;  ONE  i is 0. See `taken`
    """
    total = tl.zeros_like(channel + i).to(tl.float32)
    for tap in tl.static_range(TAPS):
        if ONE:
            if tap == TAPS - 1:
                x = tl.load(given + channel, mask=inside, other=0.0)
            else:
                x = tl.load(columns + tap * CHANNELS + channel, mask=inside & (past > 0), other=0.0)
        else:
            row = i + (tap - TAPS + 1)
            x = taken(given, columns, row, past, channel, inside, CHANNELS, TAPS, stride, pending, replayed, WIDTH)
        factor = tl.load(conv + tap * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)
        total += x.to(tl.float32) * factor
    if bias is not None:
        total += tl.load(bias + channel, mask=channel < CHANNELS, other=0.0)
    return total * tl.sigmoid(total)


@jit
def keep_columns(
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
    WIDTH: tl.constexpr = 0,
):
    """Write the columns [TAPS - 1, CHANNELS] of the sequence after `upto` rows to `target`. See `taken`.

    `target` may be `columns`: the barrier ends all reads of the program before its first write.
    """
    tap = tl.arange(0, TAPSP)[:, None]
    within = (tap < TAPS - 1) & inside[None, :]
    row, at = upto - TAPS + 1 + tap, channel[None, :]
    x = taken(given, columns, row, past, at, within, CHANNELS, TAPS, stride, pending, replayed, WIDTH)
    tl.debug_barrier()
    tl.store(target + tap * CHANNELS + channel[None, :], x, mask=within)


@jit
def keep_rows(given, pending, rows, channel, inside, stride, WIDTH: tl.constexpr):
    """Make numbers of the step's rows pending ones. given, pending: their first rows."""
    for i in range(0, rows):
        tl.store(pending + i * WIDTH + channel, tl.load(given + i * stride + channel, mask=inside), mask=inside)


@jit
def replayed_of(length, past, MOST: tl.constexpr):
    """Return how many pending rows were accepted. length: place of the length at which the state stands."""
    return tl.where(past > 0, tl.minimum(tl.maximum(past - tl.load(length), 0), MOST), 0)


@jit
def stand(arrived, places, slot, past, rows, lazy, ALL: tl.constexpr):
    """Write the lengths at which a sequence's state and its copies stand, when all its programs have read the old one.

    arrived   the sequence's counter, of ALL programs;  places  kept_at, kept, lengths and their stride
    """
    kept_at, kept, lengths, stride = places
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == ALL - 1:
        tl.store(arrived, 0)
        tl.store(lengths + slot * stride, tl.where(lazy, past, past + rows))
        for n in range(0, 2):
            length = tl.load(kept_at + 2 * slot + n)
            if (length > past) & (length <= past + rows):
                tl.store(lengths + tl.load(kept + 2 * slot + n).to(tl.int64) * stride, length)


@jit
def softplus(x):
    """Return log(1 + exp(x)), to the last digits also where it is small."""
    grown = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + grown
    part = tl.where(above == 1.0, 1.0, above - 1.0)
    soft = tl.where(above == 1.0, grown, tl.log(above) * (grown / part))  # log(1 + grown)
    return tl.where(x > 20.0, x, soft)


@jit
def part_of(n, places, G: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr):
    """Return where part n is: its sequence, head, part of the head, row in the step, slot and length before the row.

    Rows of sequences that have no row, or several, are negative. places: query_start, seq_lens, slots
    """
    query_start, seq_lens, slots = places
    s, head, part = n // (H * PARTS), n // PARTS % H, n % PARTS
    row = tl.load(query_start + s)
    one = tl.load(query_start + s + 1) == row + 1
    return s, head, part, tl.where(one, row, -1), tl.load(slots + s).to(tl.int64), tl.load(seq_lens + s) - 1


@jit
def read_part(
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
    """Return the matrix of part n, in its own type; zeros before a sequence's first token.

    sizes   of keys and values of a head
    """
    s, head, part, row, slot, past = part_of(n, places, G, H, PARTS)
    own = part * PART + value
    inside = (key < sizes[0])[:, None] & (own < sizes[1])[None, :] & (past > 0) & (row >= 0)
    at = head * sizes[0] * sizes[1] + key[:, None] * sizes[1] + own[None, :]
    return tl.load(matrix + slot * stride + at, mask=inside, other=0.0)
