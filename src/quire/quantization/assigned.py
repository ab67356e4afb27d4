"""The format of every parameter: by the quantization_config, and by the names of the stored tensors. No torch.

Names decide where they are known: `X.weight` without scales is unquantized whatever the config says, and a head with
scales is quantized. Embeddings, heads tied to them, routers and norms are never quantized.
"""

from collections.abc import Iterable, Mapping
from math import gcd
from typing import Any

from msgspec import convert, to_builtins
from msgspec.structs import replace

from quire.contracts.errors import ConfigError, UnsupportedModel, WeightsError
from quire.contracts.params import FLOATS, Param, Part, first_expert, num_experts, of_expert
from quire.contracts.scheme import Scheme
from quire.quantization.formats import FORMATS, MARKS
from quire.quantization.joined_integers import are_integers, common_scheme
from quire.quantization.microscaled import GPT_OSS
from quire.quantization.read import ONLINE
from quire.quantization.rules import HEAD, Rule, Rules, head_is_quantized, rules_of
from quire.quantization.scheme_words import scheme_words
from quire.quantization.slices import mixes_groups, packed_scheme, regrouped

NEVER = (  # .value: of operations of transformers' code
    "embed.weight",
    "norm.weight",
    ".router.weight",
    ".shared_gate.weight",
    ".head_norm.q",
    ".head_norm.k",
    ".index.heads.weight",
    ".value",
)
DEQUANTIZED = ".kv_up.weight"  # the kernels of latent attention read it
# Strengths, decays and gates of recurrent layers: an error in a decay grows with each token. They are read as they are
# stored, and not quantized here.
STEERING = (".delta.rates.weight", ".delta.decays.weight", ".delta.gates.weight")
EMBEDDED = "embed_tokens.weight"  # the embedding's tensor, which a tied head on another stage reads, too
OF_EXPERTS = 32  # columns: the groups that kernels of experts run are multiples of it
MIXED = "mixed"  # key of the schemes that all experts of a layer get, where they are stored in several
FOUND = "found"  # key of the modules whose stored tensors contradict the config


def with_formats(params: Iterable[Param], config: Mapping[str, Any]) -> tuple[Param, ...]:
    """Return the parameters with their quantization (`format`, `stored` and `scheme` of `Param`) filled in.

    config   quantization_config of the checkpoint, as `settled` returns it; {}: unquantized
    Raises UnsupportedModel where the parts of a fused matrix differ, or the group size does not divide the columns, and
    ConfigError where a rank's slice would cut a group into parts that no kernel runs.
    """
    if not config:
        return tuple(params)
    if config["quant_method"] == ONLINE:
        return tuple(_online(param) if is_quantizable(param) else param for param in params)
    rules, mixed = _with_found(config), {name: convert(one, Scheme) for name, one in config.get(MIXED, {}).items()}
    made = tuple(
        param
        if not is_quantizable(param)
        else _with_schemes(param, rules, mixed[param.name])
        if param.name in mixed
        else _with_format(param, rules)
        for param in params
    )
    _check_experts(made)
    made = _with_one_group(made)
    # A kernel runs both matrices of an expert: where it cannot run one, both are dequantized.
    plain = {param.module for param in made if _is_of_experts(param) and param.scheme is None}
    return tuple(replace(param, scheme=None) if param.module in plain else param for param in made)


def settled(config: dict[str, Any], params: Iterable[Param], stored: Mapping[str, str]) -> dict[str, Any]:
    """Correct `config` by the tensors in the checkpoint: return it with these facts under the key `FOUND`.

    The facts are the modules that are stored unquantized, and a flag: the LM head is stored quantized. Under `MIXED`
    are the schemes that hold the numbers of all experts of a layer, where experts have several: ranks pack them alike.
    params   parameters of the whole model
    stored   tensor names in the checkpoint -> their safetensors dtypes ("BF16"), "" for unknown; {}: names unknown
    Raises WeightsError for a module that the config leaves unquantized and the checkpoint stores quantized.
    """
    if not config or config["quant_method"] == ONLINE:
        return config
    params, rules, plain, head = tuple(params), rules_of(config), list[str](), False
    if differs_by_module(config) and (mixed := _mixed(params, rules)):
        config = config | {MIXED: mixed}
    if not stored:
        return config
    for part in (part for param in params if is_quantizable(param) for part in param.parts):
        module = _module(part)
        mark = next((name for name in MARKS if f"{module}{name}" in stored), "")
        if module == HEAD:
            head = bool(mark)
        elif mark and rules(module) is None:
            raise WeightsError(
                f"{module}{mark} is stored, but quantization_config leaves {module} unquantized: use "
                "the config.json that belongs to these weights."
            )
        elif not mark and stored.get(part.stored, "none") in ("", *FLOATS):
            plain.append(module)
    return config | {FOUND: {"plain": plain, "head": head}}


def _mixed(params: Iterable[Param], rules: Rules) -> dict[str, Any]:
    """Return name of a parameter of experts -> scheme of all its experts as plain values, where they have several."""
    found = dict[str, Any]()
    for param in filter(_is_of_experts, params):
        each = {rules(_module(part)) for part in param.parts}
        own = [rule for rule in each if rule is not None and are_integers(rule.scheme)]
        alike = len(own) == len(each) and len({(rule.format, rule.scheme.order) for rule in own}) == 1
        if alike and len(own) > 1:
            found[param.name] = to_builtins(common_scheme([rule.scheme for rule in own]))
    return found


def differs_by_module(config: Mapping[str, Any]) -> bool:
    """True for a quantization_config by which experts of a layer may have several schemes."""
    return bool(config.get("dynamic") or config.get("quantized_layers")) or len(config.get("config_groups") or ()) > 1


def decided_by(param: Param, config: Mapping[str, Any]) -> str:
    """Return words for the source that set a parameter's format, such as "--quantization"; "": never quantized."""
    if not config or not is_quantizable(param):
        return ""
    if config["quant_method"] == ONLINE:
        return "--quantization"
    if FOUND not in config:
        return "quantization_config"
    named = any(module in config[FOUND]["plain"] or module == HEAD for module in map(_module, param.parts))
    return "names of stored tensors" if named else "quantization_config"


def is_quantizable(param: Param) -> bool:
    """True for a matrix that a checkpoint may store quantized. Embeddings, norms and routers are never quantized."""
    named = param.name.endswith(NEVER) or param.parts[0].stored.endswith(EMBEDDED)
    return len(param.shape) == 2 and not named


def is_worthwhile(param: Param) -> bool:
    """True for a matrix that is quantized where a checkpoint is written in another format."""
    return is_quantizable(param) and not param.name.endswith(STEERING)


def _with_found(config: Mapping[str, Any]) -> Rules:
    """Return the rules with the modules that were found to differ."""
    rules, found = rules_of(config), config.get(FOUND)
    plain = frozenset(found["plain"] if found else ())
    head = found["head"] if found else head_is_quantized(config)
    return lambda module: None if module in plain or (module == HEAD and not head) else rules(module)


def _with_format(param: Param, rules: Rules) -> Param:
    first = rules(_module(param.parts[0]))
    for part in param.parts:
        if (other := rules(_module(part))) != first:
            raise UnsupportedModel(
                f"{_words(param.parts[0].stored, first)}, {_words(part.stored, other)}: they form one matrix, so they "
                "must have one format: use a checkpoint that quantizes both alike."
            )
    if first is None:
        return param
    if param.parts[0].expert >= 0 and first.format != GPT_OSS.name:
        raise UnsupportedModel(
            f"{_words(param.parts[0].stored, first)} and holds all experts: it is read unquantized or in MXFP4. Use a "
            "checkpoint that stores each expert by itself."
        )
    stored = first.scheme
    _check_groups(param, stored)
    one = replace(first_expert(param), format=first.format, stored=stored)  # slices of all experts are cut alike
    scheme = None if _is_dequantized(param, stored) else packed_scheme(one.parts, stored)
    _refuse_cuts(one)
    return replace(param, format=first.format, stored=stored, scheme=scheme)


def _with_schemes(param: Param, rules: Rules, common: Scheme) -> Param:
    """Return a parameter of experts with several schemes, of which `common` holds all numbers."""
    count = num_experts(param)
    each = [_with_format(of_expert(param, place, count), rules) for place in range(count)]
    one = replace(each[0], stored=common)
    _refuse_cuts(one)
    scheme = None if each[0].scheme is None else packed_scheme(one.parts, common)
    stored = tuple(own.stored for own in each if own.stored is not None)
    return replace(param, format=one.format, stored=common, each=stored, scheme=scheme)


def _refuse_cuts(param: Param) -> None:
    """Raise ConfigError if a rank cannot read its slices of a quantized matrix."""
    if why := _objection(param):
        whole = ", or whole experts for each rank (--enable-expert-parallel)" * (param.shard == "experts")
        raise ConfigError(f"{why}: use -tp {_fitting(param)}{whole}.")


def _objection(param: Param) -> str:
    """Return the reason why a rank cannot read its slices of a quantized matrix, or ""."""
    assert param.stored is not None
    if why := FORMATS[param.format].objection(param):
        return why
    wide, own = param.stored.block[1], regrouped(param.parts, param.stored).block[1]
    if param.shard != "experts" or own == wide or own % OF_EXPERTS == 0:
        return ""
    return (
        f"{param.parts[0].stored} has groups of {wide} columns, which a rank's {param.shape[1]} columns cut into "
        f"groups of {own}; kernels of experts run multiples of {OF_EXPERTS}"
    )


def _fitting(param: Param) -> str:
    """Return the divisors of the number of ranks that can share the matrix, such as "1, 2 or 4".

    These can share the heads, too.
    """
    part = next(one for one in param.parts if not one.whole)
    asked, fits = round(part.matrix[part.axis] / part.count), list[str]()
    for ranks in (count for count in range(1, asked) if asked % count == 0):
        cut = [replace(one, start=0, count=one.matrix[one.axis] // ranks) for one in param.parts]
        shape = (sum(one.rows for one in cut), cut[0].local_shape[1])
        if not _objection(replace(param, shape=shape, parts=tuple(cut))):
            fits.append(str(ranks))
    return " or ".join(filter(None, (", ".join(fits[:-1]), fits[-1])))


def _is_dequantized(param: Param, stored: Scheme) -> bool:
    """True for a matrix that no kernel runs as it is stored: the loader dequantizes it."""
    return param.name.endswith(DEQUANTIZED) or mixes_groups(param.parts, stored)


def _check_groups(param: Param, stored: Scheme) -> None:
    width, part = stored.block[1], param.parts[0]
    if stored.values in ("w4", "w8", "e2m1") and (part.matrix[1] % (width or 1) or part.matrix[1] % 8):
        raise UnsupportedModel(
            f"{part.stored} has {part.matrix[1]} columns, which groups of {width or 8} do not "
            "divide: use a checkpoint with another group size."
        )


def _check_experts(params: Iterable[Param]) -> None:
    """Refuse experts whose two matrices are of different kinds: a kernel runs both. Integers may have other bits."""
    own: dict[str, Param] = {}
    for param in params:
        if _is_of_experts(param):
            other = own.setdefault(param.module, param)
            ours, theirs = (one.stored for one in (param, other))
            mixed = ours and theirs and are_integers(ours) and are_integers(theirs)
            if not mixed and (ours and ours.needs) != (theirs and theirs.needs):
                one, two = (_words(each.parts[0].stored, _rule(each)) for each in (other, param))
                raise UnsupportedModel(
                    f"{one}, {two}: the matrices of an expert must have the same quantization: use "
                    "a checkpoint that quantizes both alike."
                )


def _is_of_experts(param: Param) -> bool:
    """True for the matrices of experts, which have biases that are never quantized."""
    return param.shard == "experts" and is_quantizable(param)


def _with_one_group(params: tuple[Param, ...]) -> tuple[Param, ...]:
    """Give both matrices of experts the same groups where those of one are small: a kernel that runs them runs both."""
    found = dict[str, set[int]]()
    for param in filter(_is_of_experts, params):
        if param.scheme is not None and are_integers(param.scheme):
            found.setdefault(param.module, set()).add(param.scheme.block[1])
    wide = {module: gcd(*own) for module, own in found.items() if len(own) > 1 and any(one % OF_EXPERTS for one in own)}
    return tuple(
        replace(one, scheme=replace(one.scheme, block=(1, wide[one.module])))
        if one.scheme is not None and one.module in wide and _is_of_experts(one)
        else one
        for one in params
    )


def _rule(param: Param) -> Rule | None:
    return Rule(param.format, param.stored) if param.stored else None


def _online(param: Param) -> Param:
    """Quantize to blocks where every part fills its blocks, else to channels. The head stays as it is."""
    if param.name == "head.weight" or param.name.endswith((DEQUANTIZED, *STEERING)):
        return param
    fits = param.shape[1] % 128 == 0 and all(part.rows % 128 == 0 for part in param.parts)
    block, inputs = ((128, 128), "group") if fits else ((1, 0), "token")
    return replace(param, format=ONLINE, scheme=Scheme(values="e4m3", block=block, inputs=inputs))


def _words(stored: str, rule: Rule | None) -> str:
    return f"{stored} is " + ("unquantized" if rule is None else f"{rule.format} ({scheme_words(rule.scheme)})")


def _module(part: Part) -> str:
    return part.stored.removesuffix(".weight")
