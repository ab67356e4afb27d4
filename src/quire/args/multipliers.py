"""Reader of the factors of Falcon-H1 in config.json, which stand at most projections of a layer. No torch."""

from typing import Any

from quire.args.keys import Keys


def read_factors(keys: Keys) -> tuple[float, float, float]:
    """Return the factors on the results of attention, of the recurrent layer beside it, and of the MLP."""
    attention = keys.positive("attention_out_multiplier", 1.0) * _inputs(keys)
    return attention, keys.positive("ssm_out_multiplier", 1.0), _several(keys, "mlp_multipliers", 2)[1]


def gate_factor(keys: Keys) -> float:
    """Return the factor on the gate of the MLP, before its activation."""
    return _several(keys, "mlp_multipliers", 2)[0]


def score_factor(keys: Keys) -> float:
    """Return the factor on scores beside that of the size of heads: of keys, and of inputs for queries and keys."""
    return keys.positive("key_multiplier", 1.0) * _inputs(keys) ** 2


def scan_factors(keys: Keys) -> tuple[float, ...]:
    """Return `MambaArgs.scales`."""
    inputs = keys.positive("ssm_in_multiplier", 1.0)
    if inputs != 1 and keys.flag("mamba_proj_bias"):
        raise keys.unsupported("ssm_in_multiplier beside mamba_proj_bias=true is not implemented: use another model.")
    found = tuple(inputs * one for one in _several(keys, "ssm_multipliers", 5))
    return () if set(found) == {1.0} else found


def _inputs(keys: Keys) -> float:
    """Return the factor on the input of attention. It moves behind its projections, as far as these have no biases."""
    factor = keys.positive("attention_in_multiplier", 1.0)
    if factor != 1 and keys.flag("attention_bias"):
        raise keys.unsupported(
            "attention_in_multiplier beside attention_bias=true is not implemented: use another model."
        )
    return factor


def _several(keys: Keys, key: str, count: int) -> tuple[float, ...]:
    def fits(value: Any) -> bool:
        return value is None or (
            isinstance(value, list)
            and len(value) == count
            and all(type(one) in (int, float) and one > 0 for one in value)
        )

    found = keys.checked(key, fits, f"a list of {count} positive numbers, or null")
    return (1.0,) * count if found is None else tuple(map(float, found))
