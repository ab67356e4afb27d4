"""Reader of rotary position settings in config.json: `rope_theta` + `rope_scaling` (old), `rope_parameters` (new).

Knows the implemented scaling kinds and checks their numbers. The rotary layer has the formulas.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from quire.args.keys import MAX_NUMBER, Keys

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
DEFAULT_THETA = 10_000.0
LAYERS = ("full_attention", "sliding_attention")  # kinds of layers with rotary settings of their own
_KNOWN = frozenset(
    "type rope_type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings "
    "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate partial_rotary_factor "
    "llama_4_scaling_beta max_position_embeddings mrope_section mrope_interleaved short_factor long_factor".split()
)


@dataclass(frozen=True, kw_only=True)
class RopeArgs:
    """Rotary position settings.

    kind   default | linear (positions / factor) | dynamic (identity up to the trained length) | llama3 | yarn |
           longrope (a divisor for each pair, of two lists) | proportional (the first `part` of the pairs of a whole
           head are rotated) | none
    original_max_position   trained length in tokens, for llama3, yarn and longrope
    attention_factor        multiplies cos and sin (yarn, longrope); None = from factor, mscale and mscale_all_dim
    divisors                of each pair of dimensions: for contexts up to the trained length, and for longer ones
    long                    the engine's context is longer than the trained length
    """

    theta: float = DEFAULT_THETA
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[tuple[float, ...], ...] = ()
    long: bool = False
    part: float = 1.0

    @property
    def extended_positions(self) -> int:
        """Number of positions that are usable with yarn; 0 for the other kinds."""
        return int(self.factor * self.original_max_position) if self.kind == "yarn" else 0


UNROTATED = RopeArgs(kind="none")


class Rotation(NamedTuple):
    """A rotation of heads: its settings, the dimensions that it rotates, and those that a kernel takes."""

    rope: RopeArgs
    rotated: int
    width: int


def of_layers(keys: Keys, kind: str) -> Keys:
    """Return the keys with the rotary settings of one kind of layers, such as "sliding_attention".

    Keys without settings by kind stay as they are. Raises ModelError.
    """
    settings = keys.object("rope_parameters") or {}
    if not any(isinstance(settings.get(one), dict) for one in LAYERS):
        return keys
    own = Keys(settings, f"{keys.source}: rope_parameters").object(kind) or {}
    return Keys({**keys, "rope_parameters": own}, keys.source)


def rope_settings(keys: Keys) -> dict[str, Any]:
    """Return the rotary settings of config.json. `rope_scaling` wins over `rope_parameters`, as in Hugging Face.

    Raises ModelError for a setting that is an object, UnsupportedModel for settings that differ by layer.
    """
    found: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        raw = keys.object(key)
        for inner, value in (raw or {}).items():
            if not isinstance(value, dict):
                continue
            where = f"{key}.{inner}={value!r}"
            if inner in _KNOWN:
                raise keys.wrong(f"{where} is an object: it must be a number, a text, true or false. Correct the file.")
            raise keys.unsupported(f"{where}: rope settings that differ by layer are not implemented.")
        found = raw or found
    return found


def read_rope(
    keys: Keys, max_positions: int, default_theta: float = DEFAULT_THETA, *, sections: bool = False
) -> tuple[RopeArgs, tuple[str, ...]]:
    """Return the checked rotary settings of a config.json, and notes about ignored keys.

    sections   True: pairs of a head may have positions of their own in images (mrope_section). In text all are equal

    Raises UnsupportedModel for a kind or key that is not implemented, ModelError for a wrong number.
    A rope_theta inside the settings wins over the outer one.
    """
    outer = keys.get("rope_theta")
    raw = Keys(
        {"rope_theta": default_theta if outer is None else outer, **rope_settings(keys)},
        f"{keys.source}: rope settings",
    )
    if raw.get("mrope_section") is not None and not sections:
        raise keys.unsupported("mrope_section is not implemented.")
    kind = raw.get("rope_type", raw.get("type", "default"))
    kind = "longrope" if kind == "su" else kind
    if kind not in KINDS:
        raise keys.unsupported(f"rope type {kind!r} is not implemented (one of {', '.join(KINDS)}).")
    theta, notes = raw.positive("rope_theta"), _notes(raw, kind, max_positions)
    if kind == "default":
        return RopeArgs(theta=theta), notes
    if kind == "proportional":
        part = raw.positive("partial_rotary_factor", 1.0)
        if part > 1:
            raise keys.wrong(f"partial_rotary_factor={part} must be at most 1.")
        return RopeArgs(theta=theta, kind=kind, factor=raw.positive("factor", 1.0), part=part), notes
    if kind == "longrope":
        return _longrope(raw, theta, keys, max_positions), notes
    if (factor := raw.positive("factor")) < 1:
        raise keys.wrong(f"rope factor={factor} must be at least 1.")
    temperature = raw.positive("mscale_all_dim") if raw.get("mscale_all_dim") else None
    common = RopeArgs(theta=theta, kind=kind, factor=factor, mscale_all_dim=temperature)
    if kind in ("linear", "dynamic"):
        return common, notes
    trained = "original_max_position_embeddings"
    original = keys.get(trained) or raw.get(trained) or keys.get("initial_context_length") or max_positions
    original = Keys({trained: original}, keys.source).size(trained)
    if kind == "yarn" and theta <= 1:
        raise keys.wrong(f"rope_theta={theta} must be above 1 with rope type 'yarn'.")
    return replace(common, original_max_position=original, **(_llama3 if kind == "llama3" else _yarn)(raw)), notes


def _longrope(raw: Keys, theta: float, keys: Keys, max_positions: int) -> RopeArgs:
    """LongRoPE (Ding et al., 2024); the factor is that of the lengths, as in Hugging Face."""
    trained = "original_max_position_embeddings"
    original = raw.size(trained) if raw.get(trained) is not None else keys.size(trained)

    def fits(value: Any) -> bool:
        return isinstance(value, list) and all(type(one) in (int, float) and 0 < one <= MAX_NUMBER for one in value)

    lists = [raw.checked(key, fits, "a list of positive numbers") for key in ("short_factor", "long_factor")]
    factor = raw.positive("factor") if raw.get("factor") is not None else max_positions / original
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return RopeArgs(
        theta=theta,
        kind="longrope",
        factor=factor,
        original_max_position=original,
        attention_factor=raw.positive("attention_factor", scale),
        divisors=tuple(tuple(map(float, one)) for one in lists),
        long=max_positions > original,
    )


def _llama3(raw: Keys) -> dict[str, float]:
    low, high = raw.positive("low_freq_factor"), raw.positive("high_freq_factor")
    if high < low:
        raise raw.wrong(f"high_freq_factor={high} must be at least low_freq_factor={low}.")
    return {"low_freq_factor": low, "high_freq_factor": high}


def _yarn(raw: Keys) -> dict[str, Any]:
    given = [key for key in ("attention_factor", "beta_fast", "beta_slow") if raw.get(key) is not None]
    given += [key for key in ("mscale", "mscale_all_dim") if raw.get(key)]
    return {"truncate": bool(raw.get("truncate", True))} | {key: raw.positive(key) for key in given}


def _notes(raw: Mapping[str, Any], kind: str, max_positions: int) -> tuple[str, ...]:
    notes = []
    unknown = sorted(set(raw) - _KNOWN)
    if unknown:
        notes.append(f"rope settings that are not known and were ignored: {', '.join(unknown)}")
    if kind == "dynamic":
        notes.append(f"dynamic rope scaling changes nothing up to {max_positions} tokens, the context length used")
    return tuple(notes)
