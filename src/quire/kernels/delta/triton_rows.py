"""Parts of the kernels of the gated delta rule: the convolution, its columns, norms, decays and gates."""

from __future__ import annotations

from quire.kernels.delta import FLOOR
from quire.kernels.triton_runtime import jit, tl

FLOOR_OF_SQUARES = None if tl is None else tl.constexpr(FLOOR)


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
    new = tl.load(given + (i - replayed) * stride + channel, mask=inside & (i >= replayed), other=0.0)
    old = tl.load(columns + (i + TAPS - 1) * CHANNELS + channel, mask=inside & (i < 0) & (past > 0), other=0.0)
    x = tl.where(i >= replayed, new, old)
    if pending is not None:
        within = (i >= 0) & (i < replayed)
        x = tl.where(within, tl.load(pending + i * WIDTH + channel, mask=inside & within, other=0.0), x)
    return x


@jit
def convolved(
    given,
    columns,
    conv,
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
    """Return silu of the convolution of channels at rows i, in float32. ONE: i is 0. See `taken`."""
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
    return total * tl.sigmoid(total)


@jit
def unit(
    given,
    columns,
    conv,
    i,
    past,
    channel,
    inside,
    factor,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    stride,
    ONE: tl.constexpr,
    AXIS: tl.constexpr,
    pending=None,
    replayed=0,
    WIDTH: tl.constexpr = 0,
):
    """Return queries or keys: `convolved`, over the root of the sum of squares along AXIS, times factor."""
    x = convolved(given, columns, conv, i, past, channel, inside, CHANNELS, TAPS, stride, ONE, pending, replayed, WIDTH)
    x = tl.where(inside, x, 0.0)
    return x * (tl.rsqrt(tl.sum(x * x, AXIS, keep_dims=True) + FLOOR_OF_SQUARES) * factor)


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
def log_decay(raw, speed, lowest, BOUNDED: tl.constexpr):
    """Return g of raw decays, shifts included. speed: exp(rate). See `quire.kernels.delta`."""
    if BOUNDED:
        return lowest * tl.sigmoid(speed * raw)
    grown = tl.exp(tl.minimum(raw, 20.0))
    above = 1.0 + grown
    part = tl.where(above == 1.0, 1.0, above - 1.0)
    soft = tl.where(above == 1.0, grown, tl.log(above) * (grown / part))  # log(1 + grown)
    return -speed * tl.where(raw > 20.0, raw, soft)


@jit
def opened(gate, SIGMOID: tl.constexpr):
    """Return the activation of gates."""
    if SIGMOID:
        return tl.sigmoid(gate)
    return gate * tl.sigmoid(gate)


@jit
def keep_rows(given, pending, rows, channel, inside, stride, WIDTH: tl.constexpr):
    """Make numbers of the step's rows pending ones. given, pending: their first rows."""
    for i in range(0, rows):
        tl.store(pending + i * WIDTH + channel, tl.load(given + i * stride + channel, mask=inside), mask=inside)
