"""Reader of rotary position settings in config.json: `rope_theta` + `rope_scaling` (old), `rope_parameters` (new).

Knows the implemented scaling kinds and checks their numbers. The rotary layer has the formulas.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.config.keys import checked, positive
from quire.contracts.errors import ModelError, UnsupportedModel

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
DEFAULT_THETA = 10_000.0
_KNOWN = frozenset("type rope_type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings "
                   "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate partial_rotary_factor".split())


@dataclass(frozen=True, kw_only=True)
class RopeArgs:
    """Rotary position settings.

    kind   default | linear (positions / factor) | dynamic (identity up to the trained length) | llama3 | yarn
    original_max_position   trained length in tokens, for llama3 and yarn
    attention_factor        multiplies cos and sin (yarn); None = from factor, mscale and mscale_all_dim
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

    @property
    def extended_positions(self) -> int:
        """Number of positions that are usable with yarn; 0 for the other kinds."""
        return int(self.factor * self.original_max_position) if self.kind == "yarn" else 0


def rope_settings(keys: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the rotary settings of config.json. `rope_scaling` wins over `rope_parameters`, as in Hugging Face.

    Raises ModelError for a setting that is an object, UnsupportedModel for settings that differ by layer.
    """
    found: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        raw = checked(keys, key, source, lambda value: value is None or isinstance(value, dict), "an object or null")
        for inner, value in (raw or {}).items():
            if not isinstance(value, dict):
                continue
            where = f"{source}: {key}.{inner}={value!r}"
            if inner in _KNOWN:
                raise ModelError(f"{where} is an object: it must be a number, a text, true or false. Correct the file.")
            raise UnsupportedModel(f"{where}: rope settings that differ by layer are not implemented.")
        found = raw or found
    return found


def read_rope(keys: Mapping[str, Any], max_positions: int, source: str,
              default_theta: float = DEFAULT_THETA) -> tuple[RopeArgs, tuple[str, ...]]:
    """Return the checked rotary settings of a config.json, and notes about ignored keys.

    Raises UnsupportedModel for a kind or key that is not implemented, ModelError for a wrong number.
    A rope_theta inside the settings wins over the outer one.
    """
    raw = rope_settings(keys, source)
    if raw.get("mrope_section") is not None:
        raise UnsupportedModel(f"{source}: mrope_section is not implemented.")
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind not in KINDS:
        raise UnsupportedModel(f"{source}: rope type {kind!r} is not implemented (one of {', '.join(KINDS)}).")
    outer = keys.get("rope_theta")
    theta = _number({"rope_theta": default_theta if outer is None else outer, **raw}, "rope_theta", source)
    notes = _notes(raw, kind, max_positions)
    if kind == "default":
        return RopeArgs(theta=theta), notes
    factor = _number(raw, "factor", source)
    if factor < 1:
        raise ModelError(f"{source}: rope factor={factor} must be at least 1.")
    temperature = _number(raw, "mscale_all_dim", source) if raw.get("mscale_all_dim") else None
    if kind in ("linear", "dynamic"):
        return RopeArgs(theta=theta, kind=kind, factor=factor, mscale_all_dim=temperature), notes
    trained = "original_max_position_embeddings"
    original = keys.get(trained) or raw.get(trained) or max_positions
    if not isinstance(original, int) or original < 1:
        raise ModelError(f"{source}: original_max_position_embeddings={original!r} must be a positive integer.")
    if kind == "llama3":
        return replace(_llama3(raw, theta, factor, original, source), mscale_all_dim=temperature), notes
    return _yarn(raw, theta, factor, original, source), notes


def _llama3(raw: Mapping[str, Any], theta: float, factor: float, original: int, source: str) -> RopeArgs:
    low, high = _number(raw, "low_freq_factor", source), _number(raw, "high_freq_factor", source)
    if high <= low:
        raise ModelError(f"{source}: high_freq_factor={high} must be above low_freq_factor={low}.")
    return RopeArgs(
        theta=theta,
        kind="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=original,
    )


def _yarn(raw: Mapping[str, Any], theta: float, factor: float, original: int, source: str) -> RopeArgs:
    optional = {
        key: _number(raw, key, source)
        for key in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        if raw.get(key) is not None and (raw[key] or "mscale" not in key)
    }
    return RopeArgs(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        truncate=bool(raw.get("truncate", True)),
        **optional,
    )


def _number(values: Mapping[str, Any], key: str, source: str) -> float:
    return positive(values, key, None, f"{source}: rope settings")


def _notes(raw: Mapping[str, Any], kind: str, max_positions: int) -> tuple[str, ...]:
    notes = []
    unknown = sorted(set(raw) - _KNOWN)
    if unknown:
        notes.append(f"rope settings that are not known and were ignored: {', '.join(unknown)}")
    if kind == "dynamic":
        notes.append(f"dynamic rope scaling changes nothing up to {max_positions} tokens, the context length used")
    return tuple(notes)
