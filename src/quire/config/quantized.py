"""Reader of the quantization_config in config.json, shared by the engine and by plans. No torch."""

from collections.abc import Collection, Mapping
from typing import Any

from quire.config import keys as read
from quire.contracts.errors import UnsupportedModel

KEY = "quantization_config"


def read_quantization(keys: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the checked quantization_config; {} for an unquantized model.

    Raises ModelError with the name of a wrong field, or UnsupportedModel when quant_method is missing: MLX and others
    write such files, and their format is unknown.
    """
    value = read.checked(keys, KEY, source, lambda value: value is None or isinstance(value, dict), "an object or null")
    if not value:
        return {}
    inside = f"{source}: {KEY}"
    if "quant_method" not in value:
        raise UnsupportedModel(f"{inside} has no quant_method, so its format is not known: use the unquantized "
                               "checkpoint of this model.")
    read.checked(value, "quant_method", inside, lambda name: isinstance(name, str) and name != "", "a name")
    if value["quant_method"] == "fp8":
        read.checked(value, "weight_block_size", inside, _is_block, "two positive integers, [rows, columns], or null")
        read.names(value, "modules_to_not_convert", inside)
    return dict(value)


def missing_format(quantization: Mapping[str, Any]) -> str:
    """Return why weights with this quantization_config cannot be run yet, and what to do; "" when they can."""
    return quantization and (f"config.json: {KEY} asks for {quantization['quant_method']!r}, which is not implemented "
                             "yet: use the unquantized checkpoint of this model.") or ""


def format_words(quantization: Mapping[str, Any]) -> str:
    """Return the format with the numbers of bits that the config names; "" for {}.

    Examples: "fp8 in blocks of 128 x 128",
    "compressed-tensors (8-bit int weights per channel, 8-bit int activations per token)".
    """
    method, block = str(quantization.get("quant_method", "")), quantization.get("weight_block_size")
    if method == "fp8" and block:
        return f"{method} in blocks of {block[0]} x {block[1]}"
    words, groups = list[str](), quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if isinstance(group, dict):
            values = (("weights", group.get("weights")), ("activations", group.get("input_activations")))
            words.append(", ".join(_values(scheme, what) for what, scheme in values if isinstance(scheme, dict)))
    if "bits" in quantization:
        size = quantization.get("group_size")
        groups = "" if size in (None, -1) else f" in groups of {size}"
        words.append(f"{quantization['bits']}-bit weights{groups}")
    details = "; ".join(dict.fromkeys(filter(None, words)))
    return f"{method} ({details})" if details else method


def _values(scheme: Mapping[str, Any], what: str) -> str:
    """Describe weights or activations of compressed-tensors: "8-bit int weights per channel"."""
    per, size = scheme.get("strategy"), scheme.get("group_size")
    per = f"group of {size}" if per == "group" and size else per
    return f"{scheme.get('num_bits')}-bit {scheme.get('type', 'int')} {what}" + (f" per {per}" if per else "")


def is_kept(name: str, kept: Collection[str]) -> bool:
    """True when `kept` (modules_to_not_convert) names a weight's module: in full, by a parent, or by its last words."""
    words = name.removesuffix(".weight").split(".")
    return any(".".join(words[: i + 1]) in kept or ".".join(words[i:]) in kept for i in range(len(words) * bool(kept)))


def _is_block(value: Any) -> bool:
    return value is None or (
        isinstance(value, list) and len(value) == 2 and all(type(side) is int and side > 0 for side in value))
