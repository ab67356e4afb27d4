"""Parts of the kernels of the gated delta rule: queries and keys, decays and gates."""

from __future__ import annotations

from quire.kernels.delta import FLOOR
from quire.kernels.state_rows import convolved, keep_columns, softplus
from quire.kernels.triton_runtime import jit, tl

FLOOR_OF_SQUARES = None if tl is None else tl.constexpr(FLOOR)


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
    x = convolved(
        given, columns, conv, None, i, past, channel, inside, CHANNELS, TAPS, stride, ONE, pending, replayed, WIDTH
    )
    x = tl.where(inside, x, 0.0)
    return x * (tl.rsqrt(tl.sum(x * x, AXIS, keep_dims=True) + FLOOR_OF_SQUARES) * factor)


@jit
def log_decay(raw, speed, lowest, BOUNDED: tl.constexpr):
    """Return g of raw decays, shifts included. speed: exp(rate). See `quire.kernels.delta`."""
    if BOUNDED:
        return lowest * tl.sigmoid(speed * raw)
    return -speed * softplus(raw)


@jit
def opened(gate, SIGMOID: tl.constexpr):
    """Return the activation of gates."""
    if SIGMOID:
        return tl.sigmoid(gate)
    return gate * tl.sigmoid(gate)


@jit
def row_of_head(
    source,
    conv,
    i,
    head,
    key,
    value,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TAPS: tl.constexpr,
    ONE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return queries, keys and values of a head at row i. source: given, columns, past, stride, pending, replayed."""
    given, own, past, stride, pending, replayed = source
    CHANNELS: tl.constexpr = 2 * G * DK + H * DV
    # Queries and keys together: loads of a number for each thread stay in one layout, smaller ones are done by all.
    is_key = tl.arange(0, 2)[:, None]
    at, inside = (is_key * G + head // (H // G)) * DK + key[None, :], (key < DK)[None, :] & (is_key < 2)
    both = unit(given, own, conv, i, past, at, inside, 1.0, CHANNELS, TAPS, stride, ONE, 1, pending, replayed, WIDTH)
    q = tl.sum(tl.where(is_key == 0, both * DK**-0.5, 0.0), 0)
    k = tl.sum(tl.where(is_key == 1, both, 0.0), 0)
    at, inside = 2 * G * DK + head * DV + value, value < DV
    v = convolved(given, own, conv, None, i, past, at, inside, CHANNELS, TAPS, stride, ONE, pending, replayed, WIDTH)
    return q, k, v


@jit
def columns_of_head(
    source,
    target,
    upto,
    head,
    number,
    VALUES: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TAPS: tl.constexpr,
    TAPSP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the columns of a head's values, or of its queries and keys. See `keep_columns` and `row_of_head`.

    number   arange of the padded size of a value, or of a key
    """
    given, own, past, stride, pending, replayed = source
    CHANNELS: tl.constexpr = 2 * G * DK + H * DV
    inside = number < (DV if VALUES else DK)
    for side in tl.static_range(2 - VALUES):
        at = 2 * G * DK + head * DV + number if VALUES else (side * G + head // (H // G)) * DK + number
        keep_columns(
            given, own, target, upto, past, at, inside, CHANNELS, TAPS, TAPSP, stride, pending, replayed, WIDTH
        )
