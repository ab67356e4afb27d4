"""Reader of a checkpoint's quantization: quantization_config of config.json, side files, and the option `quantization`.

The result is a plain dictionary, as the checkpoint has it, with a known `quant_method`. `rules.py` reads it. No torch.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from quire.args.keys import Keys
from quire.contracts.errors import ConfigError, ModelError, UnsupportedModel
from quire.quantization.microscaled import NVFP4
from quire.quantization.rules import MIXED, MODELOPT, PLAIN, in_nvfp4, rules_of

KEY = "quantization_config"
SIDE_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")  # ModelOpt, GPTQ, AWQ
ONLINE = "online fp8"  # quant_method of an unquantized checkpoint that is quantized when it is loaded
METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "awq", "gptq", "modelopt", "mxfp4")
SPELLINGS = {
    "compressed_tensors": "compressed-tensors",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
}
KERNELS = "Quire chooses kernels by itself; `quire explain` names them"
# Values of the option `quantization` -> methods of checkpoints that they stand for.
FLAGS: Mapping[str, tuple[str, ...]] = {
    **{method: (method,) for method in METHODS},
    "fp8": ("fp8", "fbgemm_fp8"),
    "ptpc_fp8": ("fp8",),
    "awq_marlin": ("awq",),
    "awq_triton": ("awq",),
    "gptq_marlin": ("gptq",),
    "gptq_bitblas": ("gptq",),
    "marlin": ("gptq", "awq"),
    "slimquant_marlin": METHODS,
    "modelopt_fp4": ("modelopt",),
    "modelopt_mixed": ("modelopt",),
    "petit_nvfp4": ("modelopt",),
    "nvfp4": ("modelopt", "compressed-tensors"),
    "auto": METHODS,
}
NV_FLAGS = ("modelopt_fp4", "petit_nvfp4", "nvfp4")  # of FLAGS, for checkpoints in NVFP4 alone
REFUSED = (
    "gguf bitsandbytes mxfp8 modelopt_mxfp8 gptq_marlin_24 hqq quark torchao "
    "auto-round auto_round inc experts_int8 moe_wna16 tpu_int8 rtn bitblas aqlm quip eetq higgs vptq spqr fp_quant "
    "exl2 exl3 deepspeedfp cpu_awq ipex fpgemm_fp8"
).split()


class Quantization(NamedTuple):
    """The quantization of a checkpoint: its checked quantization_config ({}: unquantized), and notes for the user."""

    config: dict[str, Any]
    notes: tuple[str, ...] = ()


def find_quantization(folder: Path, raw: Mapping[str, Any], asked: str | None = None) -> Quantization:
    """Return the checked quantization of the model in `folder`, from config.json or the files beside it.

    raw     decoded config.json
    asked   the option `quantization`, or None
    Raises ModelError with the name of a wrong field, UnsupportedModel for a method that is not implemented, and
    ConfigError where the option contradicts the checkpoint.
    """
    source = str(Path(folder) / "config.json")
    config = read_quantization(raw, source)
    for name in SIDE_FILES:
        if not config:
            config = _side_file(Path(folder) / name)
    if asked:
        config = _as_asked(config, asked, source)
    if config and config["quant_method"] != ONLINE:
        rules_of(config)  # their mistakes
    return Quantization(config, quantization_notes(config, asked))


def read_quantization(keys: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the checked quantization_config in `keys`, the decoded config.json at `source`; {}: unquantized."""
    for key in (KEY, "compression_config"):
        if value := Keys(keys, source).object(key):
            return _checked(value, f"{source}: {key}")
    return {}


def _side_file(path: Path) -> dict[str, Any]:
    """Return the quantization of a file beside config.json; {} where there is none."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read ({error}): download it again.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__}, not an object: download it again.")
    if "quantization" in value:  # ModelOpt
        inside = Keys(value, str(path)).checked("quantization", lambda value: isinstance(value, dict), "an object")
        value = (
            {**inside, "quant_method": "modelopt"}
            if (inside.get("quant_algo") or inside.get("kv_cache_quant_algo"))
            else {}
        )
    by_name = {"quantize_config.json": "gptq", "quant_config.json": "awq"}.get(path.name, "modelopt")
    return _checked({"quant_method": by_name, **value}, str(path)) if value else {}


def _checked(value: Mapping[str, Any], inside: str) -> dict[str, Any]:
    config = dict(value)
    if "quant_method" not in config and "method" in config:
        config["quant_method"] = config["method"]
    if "quant_method" not in config and isinstance(config.get("quant_algo"), str):
        config["quant_method"] = "modelopt"
    if "quant_method" not in config:
        raise UnsupportedModel(
            f"{inside} has no quant_method, so its format is not known: use the unquantized checkpoint of this model."
        )
    keys = Keys(config, inside)
    keys.checked("quant_method", lambda name: isinstance(name, str) and name != "", "a name")
    method = config["quant_method"] = SPELLINGS.get(config["quant_method"].lower(), config["quant_method"].lower())
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        method = "bitsandbytes"
    if method not in METHODS:
        raise UnsupportedModel(f"{inside} asks for {method!r}, which is not implemented: {PLAIN}.")
    for key in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"):
        keys.names(key)
    keys.checked(
        "kv_cache_scheme", lambda value: value is None or isinstance(value, dict | str), "an object, a word or null"
    )
    checks = {"compressed-tensors": _check_groups, "gptq": _check_gptq, "modelopt": _check_layers}
    checks.get(method, _check_block)(keys)
    return config


def _check_block(keys: Keys) -> None:
    keys.checked("weight_block_size", _is_block, "two positive integers, [rows, columns], or null")


def _check_layers(keys: Keys) -> None:
    mixed = str(keys.get("quant_algo")).upper() == MIXED
    keys.checked(
        "quantized_layers",
        lambda value: (
            (value is None and not mixed)
            or isinstance(value, dict)
            and all(isinstance(layer, dict) for layer in value.values())
        ),
        "an object of modules, each with its quant_algo",
    )


def _check_gptq(keys: Keys) -> None:
    def blocks(value: Any) -> bool:
        return (
            value is None
            or isinstance(value, list)
            and all(isinstance(group, list) and all(isinstance(name, str) for name in group) for group in value)
        )

    def rules(value: Any) -> bool:
        return (
            value is None
            or isinstance(value, dict)
            and all(isinstance(one, dict) and _is_pattern(re.sub(r"^[+-]:", "", name)) for name, one in value.items())
        )

    keys.checked("modules_in_block_to_quantize", blocks, "a list of lists of names")
    keys.checked("dynamic", rules, "an object of regular expressions and their changes")


def _check_groups(keys: Keys) -> None:
    groups = keys.checked(
        "config_groups",
        lambda value: isinstance(value, dict) and all(isinstance(group, dict) for group in value.values()),
        "an object of groups",
        {},
    )
    for name, values in groups.items():
        group = Keys(values, f"{keys.source}: config_groups: {name}")
        patterns = [*group.names("targets"), *(keys.get("ignore") or ())]
        weights, _, _ = (group.object(key) for key in ("weights", "input_activations", "output_activations"))
        Keys(weights or {}, f"{group.source}: weights").checked(
            "block_structure",
            lambda value: value is None or _is_block(value),
            "two positive integers, [rows, columns], or null",
        )
        for pattern in patterns:
            if pattern.startswith("re:") and not _is_pattern(pattern.removeprefix("re:")):
                raise keys.wrong(f"{pattern!r} is not a regular expression: correct it there.")
    if not groups and not keys.get("kv_cache_scheme"):
        raise UnsupportedModel(f"{keys.source} has no config_groups, so its format is not known: {PLAIN}.")


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _is_block(value: Any) -> bool:
    return value is None or (
        isinstance(value, list) and len(value) == 2 and all(type(side) is int and side > 0 for side in value)
    )


# --- the option -------------------------------------------------------------------------------------------------------


def check_flag(asked: str) -> str:
    """Return `asked`, the option `quantization`, in lower case. Raises ConfigError for an unimplemented name."""
    name = asked.lower().replace("compressed_tensors", "compressed-tensors")
    if name in REFUSED:
        raise ConfigError(f"--quantization {asked} is not implemented: {PLAIN}.")
    if name not in FLAGS:
        raise ConfigError(f"--quantization {asked} does not exist (one of {', '.join(FLAGS)}).")
    return name


def _as_asked(config: dict[str, Any], asked: str, source: str) -> dict[str, Any]:
    name = check_flag(asked)
    if not config:
        if name == "auto":
            return {}
        if "fp8" not in FLAGS[name] or name == "slimquant_marlin":
            raise ConfigError(
                f"--quantization {asked}: {source} has no quantization_config, and only fp8 quantizes "
                "while loading: use --quantization fp8, or a checkpoint in this format."
            )
        return {"quant_method": ONLINE}
    method = str(config["quant_method"])
    said = f"{method!r}" + " without NVFP4" * (method in FLAGS[name])
    if method not in FLAGS[name] or name in NV_FLAGS and not _holds_nvfp4(config):
        raise ConfigError(
            f"--quantization {asked} contradicts {source}, whose quantization_config says {said}: leave the flag out."
        )
    return config


def _holds_nvfp4(config: Mapping[str, Any]) -> bool:
    """True for a checked quantization_config of ModelOpt or compressed-tensors with weights in NVFP4."""
    return bool(_nvfp4_algorithms(config)) or any(in_nvfp4(group.get("weights")) for group in _groups(config))


def _quantizes_to_nvfp4(config: Mapping[str, Any]) -> bool:
    """True for a checked quantization_config that also quantizes activations to NVFP4."""
    if config.get("quant_method") == "modelopt":
        return "NVFP4" in _nvfp4_algorithms(config)
    return any(in_nvfp4(group.get("input_activations")) for group in _groups(config))


def _nvfp4_algorithms(config: Mapping[str, Any]) -> set[str]:
    """Return the algorithms of ModelOpt in the config that store weights in NVFP4."""
    if config.get("quant_method") != "modelopt":
        return set()
    layers = (config.get("quantized_layers") or {}).values()
    named = {str(one.get("quant_algo")).upper() for one in (config, *layers)}
    return {name for name in named if name in MODELOPT and MODELOPT[name].scheme == NVFP4}


def _groups(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the groups of modules of compressed-tensors."""
    return (
        tuple((config.get("config_groups") or {}).values())
        if config.get("quant_method") == "compressed-tensors"
        else ()
    )


def quantization_notes(config: Mapping[str, Any], asked: str | None = None) -> tuple[str, ...]:
    """Return notes to show the user about a checked quantization_config, such as keys that are not applied; or ().

    asked   the option `quantization`, or None
    """
    notes, method = [], config.get("quant_method")
    if method == ONLINE:
        notes.append(
            "weights are quantized to FP8 while they are loaded: blocks of 128 x 128 where they fit, else "
            "channels; activations are quantized at run time."
        )
    if method == "fbgemm_fp8" and config.get("activation_scale_ub"):
        notes.append(
            f"activation_scale_ub={config['activation_scale_ub']} is not applied: scales of activations have "
            "no upper bound here."
        )
    if _quantizes_to_nvfp4(config):
        notes.append(
            "activations are not quantized to NVFP4: weights stay packed and are widened to the type of the "
            "computation; stored scales of activations are not read."
        )
    if asked and config and method != ONLINE and check_flag(asked) not in (method, "auto"):
        notes.append(f"--quantization {asked}: the weights are {method}. {KERNELS}.")
    return tuple(notes)


# --- words ------------------------------------------------------------------------------------------------------------


def format_words(quantization: Mapping[str, Any]) -> str:
    """Describe a checked quantization_config by its method and numbers of bits; "" for {}.

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
