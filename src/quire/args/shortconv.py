"""Recurrent layers with a short convolution: their sizes by config.json. No torch."""

from typing import ClassVar

import msgspec

from quire.args.keys import Keys

MOST_TAPS = 8  # tokens of a convolution


class ShortConvArgs(msgspec.Struct, frozen=True, kw_only=True, tag="shortconv"):
    """Sizes of a recurrent layer with a short convolution (`quire.kernels.shortconv`). It keeps the last inputs alone.

    width   channels of the convolution
    taps    tokens of the convolution
    bias    both projections and the convolution have biases
    """

    one_scale: ClassVar[bool] = False

    width: int
    taps: int = 3
    bias: bool = False


def read_shortconv(keys: Keys) -> ShortConvArgs:
    """Return the sizes of the recurrent layers of LFM2. Raises ModelError or UnsupportedModel."""
    args = ShortConvArgs(
        width=keys.size("hidden_size"),
        taps=keys.size("conv_L_cache", 3, most=MOST_TAPS),
        bias=keys.flag("conv_bias"),
    )
    for key in ("conv_dim", "conv_dim_out"):
        if keys.get(key) not in (None, args.width):
            raise keys.unsupported(f"{key}={keys[key]!r} is implemented as hidden_size alone: use another model.")
    if args.taps < 2:
        raise keys.unsupported("conv_L_cache=1 is not implemented: use a model with 2 or more.")
    return args
