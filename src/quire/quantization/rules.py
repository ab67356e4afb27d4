"""The format and scheme of each module, by the quantization_config of a checkpoint. No torch.

Each method has its own words for the modules that it leaves alone, and its own way to match them.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from quire.contracts.errors import UnsupportedModel
from quire.contracts.scheme import Scheme
from quire.quantization.microscaled import GPT_OSS, MX_PACKED, MXFP4, NV_MODELOPT, NV_PACKED, NVFP4

HEAD = "lm_head"
PLAIN = (
    "use the unquantized checkpoint of this model, or one in FP8, INT8, MXFP4, NVFP4, AWQ, GPTQ or compressed-tensors"
)


class Rule(msgspec.Struct, frozen=True):
    """Storage of a weight in a checkpoint: `format` (a key of `quire.quantization.formats.FORMATS`) and scheme."""

    format: str
    scheme: Scheme


Rules = Callable[[str], Rule | None]  # module -> its rule; None: its weight is unquantized


def rules_of(config: Mapping[str, Any]) -> Rules:
    """Return a function that maps a module's name ("model.layers.0.mlp.up_proj") to its `Rule`; None: unquantized.

    config   a checked quantization_config
    Raises UnsupportedModel, here or in the function, for a quantization that no kernel runs. For "lm_head" the function
    assumes a quantized head: call `head_is_quantized` first.
    """
    return _RULES[config["quant_method"]](config)


def head_is_quantized(config: Mapping[str, Any]) -> bool:
    """True when a checked quantization_config also applies to the LM head.

    It does for compressed-tensors and modelopt, and for gptq if its key lm_head is true; for other methods never.
    """
    if config["quant_method"] == "gptq":
        return bool(config.get("lm_head"))
    return config["quant_method"] in ("compressed-tensors", "modelopt")


def refused(what: str) -> UnsupportedModel:
    """Return the error to raise for a quantization that is not implemented. `what` says so, for the message."""
    return UnsupportedModel(f"quantization_config: {what}: {PLAIN}.")


def is_kept(module: str, kept: Iterable[str]) -> bool:
    """True when `kept` (modules_to_not_convert) names the module by its full name, or by its first or last words."""
    if not (names := frozenset(kept)):
        return False
    words = module.removesuffix(".weight").split(".")
    return any(".".join(words[: i + 1]) in names or ".".join(words[i:]) in names for i in range(len(words)))


# --- fp8, fbgemm_fp8, modelopt ----------------------------------------------------------------------------------------


def _fp8(config: Mapping[str, Any]) -> Rules:
    scheme, block = str(config.get("activation_scheme") or "dynamic"), config.get("weight_block_size")
    if scheme not in ("dynamic", "static"):
        raise refused(f"activation_scheme={scheme!r} is not implemented (only dynamic and static)")
    if str(config.get("fmt") or "e4m3") != "e4m3":
        raise refused(f"fmt={config['fmt']!r} is not implemented (only e4m3)")
    if block and list(block) != [128, 128]:
        raise refused(f"FP8 in blocks of {block[0]} x {block[1]} has no kernel (only 128 x 128)")
    if block and scheme == "static":
        raise refused("FP8 blocks with static scales of activations have no kernel")
    tensor = Scheme(values="e4m3", block=(0, 0), inputs="tensor" if scheme == "static" else "token")
    blocks = Scheme(values="e4m3", block=(128, 128), inputs="group", ue8m0=config.get("scale_fmt") == "ue8m0")
    return _unless_kept(config, Rule("fp8", blocks if block else tensor))


def _fbgemm(config: Mapping[str, Any]) -> Rules:
    return _unless_kept(config, Rule("fbgemm_fp8", Scheme(values="e4m3", block=(1, 0), inputs="token")))


def _unless_kept(config: Mapping[str, Any], rule: Rule) -> Rules:
    kept = frozenset((*(config.get("modules_to_not_convert") or ()), *(config.get("ignored_layers") or ())))
    return lambda module: None if is_kept(module, kept) else rule


MODELOPT = {
    "FP8": Rule("modelopt", Scheme(values="e4m3", block=(0, 0), inputs="tensor")),
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4"), Rule(NV_MODELOPT.name, NVFP4)),
}
MIXED = "MIXED_PRECISION"  # quant_algo of a checkpoint that names the algorithm of each module in `quantized_layers`


def _modelopt(config: Mapping[str, Any]) -> Rules:
    if config.get("quant_algo") is None and config.get("kv_cache_quant_algo"):
        return lambda module: None
    patterns = [*(config.get("exclude_modules") or ()), *(config.get("ignore") or ())]
    layers = config.get("quantized_layers") or {}
    mixed = str(config.get("quant_algo")).upper() == MIXED
    rules = {name: _modelopt_rule(own, name) for name, own in layers.items()} if mixed else {}
    whole = None if mixed else _modelopt_rule(config, "")

    def rule(module: str) -> Rule | None:
        if any(fnmatchcase(module, one) or module.startswith(f"{one}.") for one in patterns):
            return None
        words = module.split(".")
        names = (".".join(words[:count]) for count in range(len(words), 0, -1))  # a module, and those around it
        return next((rules[name] for name in names if name in rules), whole)

    return rule


def _modelopt_rule(config: Mapping[str, Any], module: str) -> Rule:
    """Return the rule of a module of `quantized_layers`, or, for "", that of the whole checkpoint."""
    algorithm, size = config.get("quant_algo"), config.get("group_size")
    if (rule := MODELOPT.get(str(algorithm).upper())) is None:
        where = f" of {module}" if module else ""
        raise refused(
            f"ModelOpt quant_algo={algorithm!r}{where} is not implemented (only {', '.join(MODELOPT)} and {MIXED})"
        )
    if rule.scheme == NVFP4 and size not in (None, NVFP4.block[1]):
        raise refused(f"ModelOpt NVFP4 in groups of {size!r} has no kernel (only {NVFP4.block[1]})")
    return rule


# --- mxfp4 (gpt-oss) --------------------------------------------------------------------------------------------------


def _mxfp4(config: Mapping[str, Any]) -> Rules:
    """Experts alone are quantized, except those that `modules_to_not_convert` names: full names or globs."""
    kept, rule = config.get("modules_to_not_convert") or (), Rule(GPT_OSS.name, MXFP4)

    def quantized(module: str) -> bool:
        return "experts" in module.split(".") and not any(
            fnmatchcase(module, name) or fnmatchcase(module, f"{name}.*") for name in kept
        )

    return lambda module: rule if quantized(module) else None


# --- AWQ, GPTQ --------------------------------------------------------------------------------------------------------


def _awq(config: Mapping[str, Any]) -> Rules:
    version, kept = str(config.get("version") or "gemm").lower(), config.get("modules_to_not_convert") or ()
    if version != "gemm":
        raise refused(f"AWQ version={version!r} has another packing, which is not implemented (only gemm)")
    bits, size = _number(config, "bits", "w_bit"), _number(config, "group_size", "q_group_size")
    if bits != 4:
        raise refused(f"AWQ with {bits} bits has no kernel (only 4)")
    rule = Rule("awq", Scheme(values="w4", block=_group(size), zeros=True))
    return lambda module: None if any(one in module for one in kept) else rule


def _gptq(config: Mapping[str, Any]) -> Rules:
    inside = tuple(f".{name}" for group in config.get("modules_in_block_to_quantize") or () for name in group)
    dynamic = [
        (re.compile(re.sub(r"^[+-]:", "", name)), name.startswith("-:"), changes)
        for name, changes in (config.get("dynamic") or {}).items()
    ]
    whole = _gptq_rule(config)

    def rule(module: str) -> Rule | None:
        if module != HEAD and inside and not module.endswith(inside):
            return None
        for pattern, without, changes in dynamic:
            if pattern.match(module):
                return None if without else _gptq_rule({**config, **changes})
        return whole

    return rule


def _gptq_rule(config: Mapping[str, Any]) -> Rule:
    bits, size, version = _number(config, "bits"), _number(config, "group_size"), _gptq_version(config)
    if bits not in (4, 8):
        raise refused(f"GPTQ with {bits} bits has no kernel (only 4 and 8)")
    symmetric, order = bool(config.get("sym", True)), bool(config.get("desc_act", False)) and size > 0
    return Rule(version, Scheme(values=f"w{bits}", block=_group(size), zeros=not symmetric, order=order))


def _gptq_version(config: Mapping[str, Any]) -> str:
    version = config.get("checkpoint_format") or config.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise refused(f"GPTQ checkpoint_format={version!r} is not implemented (gptq or gptq_v2)")
    return str(version)


def _number(config: Mapping[str, Any], *keys: str) -> int:
    """Return the integer under the first of these keys that is there. Raises UnsupportedModel without one."""
    for key in keys:
        if type(config.get(key)) is int:
            return int(config[key])
    raise refused(f"{keys[0]}={config.get(keys[0])!r} is not a whole number")


def _group(size: int) -> tuple[int, int]:
    if size == -1:
        return (1, 0)
    if size <= 0 or size % 8:
        raise refused(f"group_size={size} has no kernel (only multiples of 8, or -1)")
    return (1, size)


# --- compressed-tensors -----------------------------------------------------------------------------------------------

# Values -> formats that store them.
FORMS = {
    "e4m3": ("float-quantized", "naive-quantized"),
    "int8": ("int-quantized", "naive-quantized"),
    "w4": ("pack-quantized",),
    "w8": ("pack-quantized", "int-quantized", "naive-quantized"),
    "e2m1": (MX_PACKED.name, NV_PACKED.name),
}
FLOATS_OF_4_BITS = {MX_PACKED.name: MXFP4, NV_PACKED.name: NVFP4}
# (values, rows of a block, activations) that kernels run; 0: scales of channels or of the tensor.
RUN = frozenset(
    {
        ("e4m3", 128, "group"),
        *((values, 0, inputs) for values in ("e4m3", "int8") for inputs in ("token", "tensor")),
        *((values, rows, "") for values in ("w4", "w8") for rows in (0, 1)),
        ("e2m1", 1, ""),
    }
)


def _compressed(config: Mapping[str, Any]) -> Rules:
    ignored, groups = _Names(config.get("ignore") or ()), list((config.get("config_groups") or {}).values())
    targets = [(_Names(group.get("targets") or ()), _group_rule(config, group)) for group in groups]

    def rule(module: str) -> Rule | None:
        if ignored.exactly(module) or ignored.by_pattern(module):
            return None
        for matches in (_Names.exactly, _Names.by_pattern, _Names.by_class):
            for names, found in targets:
                if matches(names, module):
                    return found
        return None

    return rule


class _Names:
    """Targets or exceptions of compressed-tensors: names of modules, patterns ("re:..."), classes of modules."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._patterns = [re.compile(name.removeprefix("re:")) for name in names if name.startswith("re:")]

    def exactly(self, module: str) -> bool:
        return module in self._names

    def by_pattern(self, module: str) -> bool:
        return any(pattern.match(module) for pattern in self._patterns)

    def by_class(self, module: str) -> bool:
        return "Linear" in self._names


def _group_rule(config: Mapping[str, Any], group: Mapping[str, Any]) -> Rule | None:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if weights is None:
        return None
    if group.get("output_activations"):
        raise refused("quantized output activations are not implemented")
    bits, kind, strategy = (
        str(weights.get(key) or default)
        for key, default in (("num_bits", "?"), ("type", "int"), ("strategy", "tensor"))
    )
    words, form = f"compressed-tensors weights of {bits}-bit {kind} per {strategy}", group.get("format")
    form, block = form or config.get("format"), _block(weights, strategy)
    # Activations in NVFP4 stay as they are: weights are widened to the type of the computation.
    activations = "" if form == NV_PACKED.name and in_nvfp4(inputs) else _inputs(inputs, kind, words)
    values = {
        ("float", "8"): "e4m3",
        ("int", "8"): "int8" if inputs else "w8",
        ("int", "4"): "w4",
        ("float", "4"): "e2m1",
    }.get((kind, bits))
    zeros, order = weights.get("symmetric") is False, weights.get("actorder") in ("group", True)
    if values is None or block is None:
        raise refused(f"{words} have no kernel")
    if form not in FORMS[values]:
        raise refused(f"{words}: format={form!r} is not implemented (one of {', '.join(FORMS[values])})")
    scheme = FLOATS_OF_4_BITS.get(str(form)) if values == "e2m1" else None
    if scheme is not None and (block != scheme.block or zeros or order):
        raise refused(
            f"{words} of {weights.get('group_size')} columns have no kernel in the format {form} (only symmetric "
            f"groups of {scheme.block[1]})"
        )
    if zeros and form != "pack-quantized":
        raise refused(f"{words} with zero points are implemented in the format pack-quantized only")
    if (values, block[0] if block[1] else 0, activations) not in RUN:
        raise refused(f"{words} with activations {_words(inputs)} have no kernel")
    stored = {"e4m3": "float-quantized", "int8": "int-quantized"}.get(values, form)
    stored = "int-quantized" if stored == "naive-quantized" else stored
    found = Scheme(values=values, block=block, zeros=zeros, order=order, inputs=activations)
    return Rule(str(stored), scheme or found)


def _block(weights: Mapping[str, Any], strategy: str) -> tuple[int, int] | None:
    """Return rows and columns that share a scale; None for a strategy that is not implemented."""
    size = weights.get("group_size")
    if strategy in ("group", "tensor_group") and type(size) is int and size > 0:
        return _group(size)
    if strategy == "block":
        return (128, 128) if list(weights.get("block_structure") or ()) == [128, 128] else None
    return {"tensor": (0, 0), "channel": (1, 0)}.get(strategy)


def in_nvfp4(inputs: Mapping[str, Any] | None) -> bool:
    """True for the description of activations in NVFP4, in the words of compressed-tensors or ModelOpt."""
    return inputs is not None and (inputs.get("num_bits"), inputs.get("type"), inputs.get("group_size")) == (
        4,
        "float",
        NVFP4.block[1],
    )


def _inputs(inputs: Mapping[str, Any] | None, kind: str, words: str) -> str:
    if not inputs:
        return ""
    strategy, dynamic, size = inputs.get("strategy"), inputs.get("dynamic"), inputs.get("group_size")
    exact = inputs.get("num_bits") == 8 and inputs.get("type", "int") == kind and inputs.get("symmetric") is not False
    if exact and dynamic is True and (strategy == "token" or strategy == "group" and size == 128):
        return str(strategy)
    if exact and not dynamic and strategy == "tensor":
        return "tensor"
    raise refused(f"{words} with activations {_words(inputs)} have no kernel")


def _words(inputs: Mapping[str, Any] | None) -> str:
    if not inputs:
        return "that are not quantized"
    how = "dynamic" if inputs.get("dynamic") else "static"
    symmetric = "" if inputs.get("symmetric") is not False else ", asymmetric"
    numbers = f"{inputs.get('num_bits')}-bit {inputs.get('type', 'int')}"
    return f"of {numbers} per {inputs.get('strategy')} ({how}{symmetric})"


_RULES: Mapping[str, Callable[[Mapping[str, Any]], Rules]] = {
    "fp8": _fp8, "fbgemm_fp8": _fbgemm, "modelopt": _modelopt, "awq": _awq, "gptq": _gptq,
    "compressed-tensors": _compressed, "mxfp4": _mxfp4,
}  # fmt: skip
