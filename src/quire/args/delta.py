"""Recurrent layers with the gated delta rule: their sizes by config.json. No torch."""

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from quire.args.keys import Keys

MOST_DIM = 256  # numbers of a key or a value, as far as kernels take them
MOST_TAPS = 8  # tokens of a convolution
# Values that families take for missing keys: key heads, heads, numbers of a key and of a value.
DEFAULTS: Mapping[str, tuple[int, int, int, int]] = {"qwen3_next": (16, 32, 128, 128), "qwen3_5": (16, 32, 128, 128)}


class DeltaArgs(msgspec.Struct, frozen=True, kw_only=True, tag="delta"):
    """Sizes of a recurrent layer with the gated delta rule (`quire.kernels.delta`).

    It keeps a matrix [key_dim, value_dim] for each head, and the last taps - 1 inputs of its convolution.

    key_heads    heads of queries and keys; each serves heads / key_heads heads of values
    taps         tokens of the convolution
    act          activation of the gate of its result, "silu" or "sigmoid"
    by_head      True: the projection is stored key head by key head, each with its queries, keys, values and gates, and
                 that of strengths and decays likewise; False: all queries come first, then all keys, ...
    """

    one_scale: ClassVar[bool] = False

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    act: str = "silu"
    by_head: bool = False


def read_delta(keys: Keys, family: str) -> DeltaArgs:
    """Return the sizes of the recurrent layers of a family, a key of `DEFAULTS`. Raises ModelError."""
    key_heads, heads, key_dim, value_dim = DEFAULTS[family]
    act = keys.get("output_gate_type") or "silu"
    if act not in ("silu", "swish", "sigmoid"):
        raise keys.unsupported(f"output_gate_type={act!r} is not implemented: use a model with silu or sigmoid.")
    args = DeltaArgs(
        key_heads=keys.size("linear_num_key_heads", key_heads),
        heads=keys.size("linear_num_value_heads", heads),
        key_dim=keys.size("linear_key_head_dim", key_dim, most=MOST_DIM),
        value_dim=keys.size("linear_value_head_dim", value_dim, most=MOST_DIM),
        taps=keys.size("linear_conv_kernel_dim", 4, most=MOST_TAPS),
        act="sigmoid" if act == "sigmoid" else "silu",
        by_head=family == "qwen3_next",
    )
    if args.heads % args.key_heads:
        raise keys.wrong(
            f"linear_num_value_heads={args.heads} is not a multiple of linear_num_key_heads={args.key_heads}: correct "
            "the file."
        )
    if args.taps < 2:
        raise keys.unsupported("linear_conv_kernel_dim=1 is not implemented: use a model with 2 or more.")
    return args
