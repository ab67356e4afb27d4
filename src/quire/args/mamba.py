"""Recurrent layers with Mamba 2: their sizes by config.json. No torch."""

from typing import Any, ClassVar

import msgspec

from quire.args.keys import Keys
from quire.args.multipliers import scan_factors

MOST_TAPS = 8  # tokens of a convolution
MOST_DIM = 1024  # numbers of a state's side, as far as sizes are sensible


class MambaArgs(msgspec.Struct, frozen=True, kw_only=True, tag="mamba"):
    """Sizes of a recurrent layer with Mamba 2 (`quire.kernels.mamba`).

    It keeps a matrix [state_dim, head_dim] for each head, and the last taps - 1 inputs of its convolution.

    groups         inputs and outputs of states are those of a group of heads / groups heads
    taps           tokens of the convolution; conv_bias: it adds a bias
    input_bias, output_bias   biases of the two projections
    norm           norm of the result, of the numbers of a group together: "gated" (behind the gate), "first" (before
                   it), or "" (none)
    steps          least and greatest step
    scales         factors on the parts of the first projection: gates, values, inputs, outputs and steps; (): all are 1
    """

    one_scale: ClassVar[bool] = False

    heads: int
    groups: int
    head_dim: int
    state_dim: int
    taps: int = 4
    conv_bias: bool = True
    input_bias: bool = False
    output_bias: bool = False
    norm: str = "gated"
    steps: tuple[float, float] = (0.0, float("inf"))
    scales: tuple[float, ...] = ()

    @property
    def width(self) -> int:
        """Numbers of all heads."""
        return self.heads * self.head_dim


def read_granite(keys: Keys) -> MambaArgs:
    """Return the sizes of the recurrent layers of Granite 4. Raises ModelError or UnsupportedModel."""
    bias = keys.flag("mamba_proj_bias")
    return _checked(
        keys,
        _sizes(keys, width=keys.size("mamba_expand", 2) * keys.size("hidden_size"), input_bias=bias, output_bias=bias),
    )


def read_falcon(keys: Keys) -> MambaArgs:
    """Return the sizes of the recurrent layers of Falcon-H1. Raises ModelError or UnsupportedModel."""
    whole = keys.size("mamba_expand", 2) * keys.size("hidden_size")
    width = whole if keys.get("mamba_d_ssm", 0) is None else keys.size("mamba_d_ssm", 1024)
    norm = "" if not keys.flag("mamba_rms_norm") else "first" if keys.flag("mamba_norm_before_gate", True) else "gated"
    bias = {"input_bias": keys.flag("mamba_proj_bias"), "output_bias": keys.flag("projectors_bias")}
    return _checked(keys, _sizes(keys, width=width, **bias, norm=norm, scales=scan_factors(keys)))


def read_nemotron(keys: Keys) -> MambaArgs:
    """Return the sizes of the recurrent layers of Nemotron-H. Raises ModelError or UnsupportedModel."""
    if (act := keys.get("mamba_hidden_act", "silu")) != "silu":
        raise keys.unsupported(f"mamba_hidden_act={act!r} is not implemented: use a model with silu.")
    bias = keys.flag("use_bias")
    args = MambaArgs(
        heads=keys.size("mamba_num_heads", 128),
        groups=keys.size("n_groups", 8),
        head_dim=keys.size("mamba_head_dim", 64),
        state_dim=keys.size("ssm_state_size", 128, most=MOST_DIM),
        taps=keys.size("conv_kernel", 4, most=MOST_TAPS),
        conv_bias=keys.flag("use_conv_bias", True),
        input_bias=bias,
        output_bias=bias,
        steps=_steps(keys),
    )
    return _checked(keys, args)


def _sizes(keys: Keys, *, width: int, input_bias: bool, output_bias: bool, **more: Any) -> MambaArgs:
    """Return the sizes of layers whose keys begin with "mamba_". width: numbers of all heads."""
    heads = keys.size("mamba_n_heads", 128)
    dim = width // heads if keys.get("mamba_d_head", "auto") == "auto" else keys.size("mamba_d_head")
    if width % heads or dim * heads != width:
        raise keys.wrong(f"mamba_n_heads={heads} of mamba_d_head={dim} are not {width} numbers: correct the file.")
    return MambaArgs(
        heads=heads,
        groups=keys.size("mamba_n_groups", 1),
        head_dim=dim,
        state_dim=keys.size("mamba_d_state", 256, most=MOST_DIM),
        taps=keys.size("mamba_d_conv", 4, most=MOST_TAPS),
        conv_bias=keys.flag("mamba_conv_bias", True),
        input_bias=input_bias,
        output_bias=output_bias,
        steps=_steps(keys),
        **more,
    )


def _checked(keys: Keys, args: MambaArgs) -> MambaArgs:
    if args.heads % args.groups:
        raise keys.wrong(f"{args.heads} heads of Mamba are not a multiple of {args.groups} groups: correct the file.")
    if args.taps < 2:
        raise keys.unsupported("a convolution over one token is not implemented: use a model with 2 or more.")
    if args.head_dim > MOST_DIM:
        raise keys.unsupported(
            f"{args.head_dim} numbers of a head are not implemented, only {MOST_DIM}: use another model."
        )
    return args


def _steps(keys: Keys) -> tuple[float, float]:
    """Return time_step_limit. Files of transformers 5 spell its infinity as an object."""

    def fits(value: Any) -> bool:
        pair = isinstance(value, list | tuple) and len(value) == 2
        return value is None or (pair and all(_number(one) is not None for one in value))

    limits = keys.checked("time_step_limit", fits, "two numbers, or null", None)
    low, high = (0.0, float("inf")) if limits is None else (_number(one) or 0.0 for one in limits)
    if not 0 <= low <= high or not high:
        raise keys.wrong(f"time_step_limit={limits!r} must be two numbers of at least 0, the lower one first.")
    return low, high


def _number(value: Any) -> float | None:
    if isinstance(value, dict) and value == {"__float__": "Infinity"}:
        return float("inf")
    return float(value) if type(value) in (int, float) else None
