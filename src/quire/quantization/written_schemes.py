"""Schemes that `quire quantize` writes: their formats, stored tensors, and quantization_config. No torch."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from quire.contracts.errors import ConfigError
from quire.contracts.params import Param, Part
from quire.contracts.scheme import Scheme
from quire.quantization.formats import FORMATS
from quire.quantization.kfirst import AWQ
from quire.quantization.microscaled import MX_PACKED, MXFP4, NV_PACKED, NVFP4
from quire.quantization.rows import FLOAT, FP8, INT, PACKED
from quire.quantization.rules import Rule

GROUP = 128  # columns of a group by default
SCHEMES: Mapping[str, Rule] = {
    "fp8-block": Rule(FP8.name, Scheme(values="e4m3", block=(128, 128), inputs="group")),
    "fp8-channel": Rule(FLOAT.name, Scheme(values="e4m3", block=(1, 0), inputs="token")),
    "w8a8-int8": Rule(INT.name, Scheme(values="int8", block=(1, 0), inputs="token")),
    "w8a16": Rule(PACKED.name, Scheme(values="w8", block=(1, GROUP))),
    "w4a16": Rule(PACKED.name, Scheme(values="w4", block=(1, GROUP))),
    "mxfp4": Rule(MX_PACKED.name, MXFP4),
    "nvfp4": Rule(NV_PACKED.name, NVFP4),
    "awq-int4": Rule(AWQ.name, Scheme(values="w4", block=(1, GROUP), zeros=True)),
}
METHODS = {FP8.name: "fp8", AWQ.name: "awq"}  # format -> quant_method; of the others compressed-tensors
BYTES = {"F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8, "F32": 4, "BF16": 2, "F16": 2}


class Stored(NamedTuple):
    """A tensor of a checkpoint that `quire quantize` writes.

    role    "values", "scale", "zero", "factor" or "shape" of a quantized matrix; "": a tensor copied from the source
            unchanged
    dtype   in safetensors' spelling, such as "BF16"
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def scheme_rule(name: str, group: int = 0) -> Rule:
    """Return the `Rule` (format and scheme) for `name`, a key of `SCHEMES` such as "w4a16".

    group   columns that share a scale (--group-size); 0: the default, -1: a scale for each row
    Raises ConfigError for an unknown name or a wrong group.
    """
    if name not in SCHEMES:
        raise ConfigError(f"scheme {name} does not exist (one of {', '.join(SCHEMES)}).")
    rule = SCHEMES[name]
    if not group or not has_groups(name):
        return rule
    if group != -1 and (group < 8 or group % 8):
        raise ConfigError(
            f"--group-size {group} is not a multiple of 8: give one like 32, 64 or 128, or -1 for a scale of each row."
        )
    scheme = Scheme(values=rule.scheme.values, block=(1, max(group, 0)), zeros=rule.scheme.zeros)
    return Rule(rule.format, scheme)


def has_groups(name: str) -> bool:
    """True when the scales of the scheme `name` belong to groups of columns, so that --group-size applies."""
    return SCHEMES[name].format in (PACKED.name, AWQ.name)


def method_of(rule: Rule) -> str:
    """Return the quant_method, for config.json, of the format of `rule`."""
    return METHODS.get(rule.format, "compressed-tensors")


def stored_of(weight: str, shape: tuple[int, int], rule: Rule, dtype: str) -> tuple[Stored, ...]:
    """Return the tensors that a checkpoint stores for a weight quantized by `rule`, instead of the weight.

    weight   name of the unquantized weight, "....q_proj.weight"
    shape    (N, K) of the weight
    dtype    dtype of the unquantized weight, in safetensors' spelling
    """
    part = Part(weight, shape, 0, shape[0])
    param = Param(name="weight", shape=shape, parts=(part,), format=rule.format, stored=rule.scheme)
    found = [
        (raw.parts[0].stored, raw.name.rpartition(".")[2], raw.readable[-1], raw.parts[0].shape)
        for raw in FORMATS[rule.format].tensors(param)
    ]
    if rule.format == PACKED.name:
        found.append((f"{weight.removesuffix('weight')}weight_shape", "shape", "I64", (2,)))
    types = {"factor": "F32"} if rule.scheme.values == "e2m1" else {"scale": scale_type(rule, dtype)}
    made = ((name, role, types.get(role, kind), size) for name, role, kind, size in found)
    return tuple(Stored(name, role, kind, size, prod(size) * BYTES[kind]) for name, role, kind, size in made)


def scale_type(rule: Rule, dtype: str) -> str:
    """Return the dtype of floating-point scales: F16 for AWQ, BF16 for compressed-tensors in BF16 models, else F32.

    dtype   dtype of the model, in safetensors' spelling
    """
    if rule.format == AWQ.name:
        return "F16"
    return "BF16" if dtype == "BF16" and method_of(rule) == "compressed-tensors" else "F32"


def quantization_config(body: Rule, head: Rule | None, kept: Sequence[str]) -> dict[str, Any]:
    """Return the quantization_config, for config.json, of a quantized checkpoint.

    body   rule of the linear layers
    head   rule of the LM head; None: it stays unquantized
    kept   names of linear layers that stay unquantized
    """
    method = method_of(body)
    assert head is None or method_of(head) == method, "a checkpoint has one quant_method"
    if method == "fp8":
        return {
            "quant_method": method,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(body.scheme.block),
            "modules_to_not_convert": list(kept),
        }
    if method == "awq":
        return {
            "quant_method": method,
            "bits": 4,
            "group_size": body.scheme.block[1] or -1,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(kept),
        }
    groups = {"group_0": _group(body, "Linear")}
    if head is not None and head != body:
        groups["group_1"] = _group(head, "lm_head")
    forms = {group["format"] for group in groups.values()}
    return {
        "quant_method": method,
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(kept),
        "kv_cache_scheme": None,
    }


def _group(rule: Rule, target: str) -> dict[str, Any]:
    """Return a config group of compressed-tensors."""
    scheme = rule.scheme
    numbers = {
        "num_bits": scheme.bits,
        "type": "float" if scheme.values in ("e4m3", "e2m1") else "int",
        "symmetric": True,
    }
    types = {"mxfp4": {"scale_dtype": "torch.uint8"}, "nvfp4": {"scale_dtype": "torch.float8_e4m3fn"}}
    strategy = "tensor_group" if scheme.factor else "group"
    wide = {"strategy": strategy, "group_size": scheme.block[1]} if scheme.block[1] else {"strategy": "channel"}
    inputs = numbers | {"strategy": "token", "dynamic": True} if scheme.inputs else None
    return {
        "targets": [target],
        "weights": numbers | wide | types.get(scheme.kind, {}) | {"dynamic": False},
        "input_activations": inputs,
        "output_activations": None,
        "format": rule.format,
    }
