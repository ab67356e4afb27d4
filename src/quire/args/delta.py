"""Recurrent layers with the gated delta rule: their sizes by config.json. No torch."""

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from quire.args.keys import MAX_NUMBER, Keys

MOST_DIM = 256  # numbers of a key or a value, as far as kernels take them
MOST_TAPS = 8  # tokens of a convolution
# Values that families take for missing keys: key heads, heads, numbers of a key and of a value.
DEFAULTS: Mapping[str, tuple[int, int, int, int]] = {"qwen3_next": (16, 32, 128, 128), "qwen3_5": (16, 32, 128, 128)}
OLMO_EPS = 1e-5  # of the norm of heads in OLMo-Hybrid, whatever rms_norm_eps is


class DeltaArgs(msgspec.Struct, frozen=True, kw_only=True, tag="delta"):
    """Sizes of a recurrent layer with the gated delta rule (`quire.kernels.delta`).

    It keeps a matrix [key_dim, value_dim] for each head, and the last taps - 1 inputs of its convolution.

    key_heads    heads of queries and keys; each serves heads / key_heads heads of values
    taps         tokens of the convolution
    act          activation of the gate of its result, "silu" or "sigmoid"
    by_head      True: the projection is stored key head by key head, each with its queries, keys, values and gates, and
                 that of strengths and decays likewise; False: all queries come first, then all keys, ...
    eps          epsilon of the norm of heads; 0: that of the model's norms
    doubled      strengths are in 0 .. 2
    low_rank     numbers between the two projections by which decays and gates are computed. Each number of a key has a
                 decay of its own then (Kimi delta attention, KDA); 0: one projection, and a decay for each head
    lowest       least logarithm of a decay, which changes its formula, see `quire.kernels.delta`; 0: there is none
    """

    one_scale: ClassVar[bool] = False

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    act: str = "silu"
    by_head: bool = False
    eps: float = 0.0
    doubled: bool = False
    low_rank: int = 0
    lowest: float = 0.0

    @property
    def decays(self) -> int:
        """Decays of a head."""
        return self.key_dim if self.low_rank else 1


def read_delta(keys: Keys, family: str) -> DeltaArgs:
    """Return the sizes of the recurrent layers of a family, a key of `DEFAULTS`.

    Raises ModelError or UnsupportedModel.
    """
    key_heads, heads, key_dim, value_dim = DEFAULTS[family]
    act = keys.get("output_gate_type") or "silu"
    if act not in ("silu", "swish", "sigmoid"):
        raise keys.unsupported(f"output_gate_type={act!r} is not implemented: use a model with silu or sigmoid.")
    return _checked(
        keys,
        DeltaArgs(
            key_heads=keys.size("linear_num_key_heads", key_heads),
            heads=keys.size("linear_num_value_heads", heads),
            key_dim=keys.size("linear_key_head_dim", key_dim, most=MOST_DIM),
            value_dim=keys.size("linear_value_head_dim", value_dim, most=MOST_DIM),
            taps=keys.size("linear_conv_kernel_dim", 4, most=MOST_TAPS),
            act="sigmoid" if act == "sigmoid" else "silu",
            by_head=family == "qwen3_next",
        ),
    )


def read_olmo(keys: Keys) -> DeltaArgs:
    """Return the sizes of the recurrent layers of OLMo-Hybrid, of which config.json may lack all.

    Raises ModelError or UnsupportedModel.
    """

    def size(key: str, default: int, most: int | None = None) -> int:
        return keys.size(key, most=most) if keys.get(key) is not None else default

    attending = keys.size("num_attention_heads")
    key_heads = size("linear_num_key_heads", attending)
    key_dim = size("linear_key_head_dim", 3 * keys.size("hidden_size") // (4 * key_heads), MOST_DIM)
    value_dim = size("linear_value_head_dim", 2 * key_dim, MOST_DIM)
    if not 0 < min(key_dim, value_dim) <= max(key_dim, value_dim) <= MOST_DIM:
        raise keys.wrong(
            f"heads of {key_dim} and {value_dim} numbers follow from hidden_size, and 1 to {MOST_DIM} are possible: "
            "add linear_key_head_dim and linear_value_head_dim."
        )
    return _checked(
        keys,
        DeltaArgs(
            key_heads=key_heads,
            heads=size("linear_num_value_heads", attending),
            key_dim=key_dim,
            value_dim=value_dim,
            taps=keys.size("linear_conv_kernel_dim", 4, most=MOST_TAPS),
            eps=OLMO_EPS,
            doubled=keys.flag("linear_allow_neg_eigval", True),
        ),
    )


def read_kimi(keys: Keys) -> DeltaArgs:
    """Return the sizes of the layers with Kimi delta attention (KDA). Raises ModelError or UnsupportedModel."""
    heads, dim = keys.size("linear_num_heads", 32), keys.size("linear_head_dim", 128, most=MOST_DIM)
    fits = lambda value: value is None or (type(value) in (int, float) and -MAX_NUMBER <= value < 0)  # noqa: E731
    return _checked(
        keys,
        DeltaArgs(
            key_heads=heads,
            heads=heads,
            key_dim=dim,
            value_dim=dim,
            taps=keys.size("linear_conv_kernel_dim", 4, most=MOST_TAPS),
            act="sigmoid",
            low_rank=dim,
            lowest=float(keys.checked("linear_lower_bound", fits, "a number below zero, or null") or 0.0),
        ),
    )


def _checked(keys: Keys, args: DeltaArgs) -> DeltaArgs:
    if args.heads % args.key_heads:
        raise keys.wrong(
            f"linear_num_value_heads={args.heads} is not a multiple of linear_num_key_heads={args.key_heads}: correct "
            "the file."
        )
    if args.taps < 2:
        raise keys.unsupported("linear_conv_kernel_dim=1 is not implemented: use a model with 2 or more.")
    if (act := keys.get("hidden_act") or "silu") != "silu":
        raise keys.unsupported(f"hidden_act={act!r} is not implemented behind convolutions: use a model with silu.")
    return args
