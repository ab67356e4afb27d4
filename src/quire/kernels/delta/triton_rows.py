"""Parts of the kernels of the gated delta rule: queries and keys, decays and gates."""

from __future__ import annotations

from quire.kernels.delta import FLOOR
from quire.kernels.state_rows import convolved, softplus
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
):
    """Return queries or keys: `convolved`, over the root of the sum of squares along AXIS, times factor."""
    x = convolved(given, columns, conv, None, i, past, channel, inside, CHANNELS, TAPS, stride, ONE)
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
