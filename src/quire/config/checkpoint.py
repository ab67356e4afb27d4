"""A checkpoint's config.json, read into the arguments of one of our model families.

Knows the spellings Hugging Face has used for each key, old and new, and which keys change the math. A key that
changes the math and is not implemented is refused by name; a key nobody knows is listed in `ModelArgs.notes`.
Knows nothing of tensors, devices or flags. No torch.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config.rope import MAX_NUMBER, RopeArgs, read_rope
from quire.contracts.errors import ModelError, ModelNotFound, UnsupportedModel

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Family:
    """What differs between the dense families when their config.json is silent, and which keys each one reads."""

    architecture: str
    qkv_bias: bool | None = False  # None: the key attention_bias says
    output_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    default_window: int | None = None  # sliding_window when the key is missing
    default_head_dim: int | None = None  # None: hidden_size / heads
    window_flag: bool = False  # sliding_window counts only with use_sliding_window
    keys: frozenset[str] = frozenset()


FAMILIES: Mapping[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", qkv_bias=None, output_bias=None, mlp_bias=None,
                    keys=frozenset({"attention_bias", "mlp_bias"})),
    "mistral": Family(architecture="MistralForCausalLM", default_window=4096),
    "qwen2": Family(architecture="Qwen2ForCausalLM", qkv_bias=True, window_flag=True),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM", qkv_bias=None, output_bias=None, qk_norm=True, default_head_dim=128,
        window_flag=True, keys=frozenset({"attention_bias"})),
}  # fmt: skip

# Keys that every family reads, or that cannot change what inference computes.
KNOWN_KEYS = frozenset(
    "architectures attention_dropout auto_map bos_token_id dtype eos_token_id head_dim hidden_act hidden_size "
    "initializer_range intermediate_size layer_types max_position_embeddings max_window_layers model_type "
    "num_attention_heads num_hidden_layers num_key_value_heads original_max_position_embeddings pad_token_id "
    "partial_rotary_factor pretraining_tp quantization_config rms_norm_eps rope_parameters rope_scaling rope_theta "
    "sliding_window tie_word_embeddings torch_dtype transformers_version use_cache use_sliding_window vocab_size "
    "_name_or_path _attn_implementation attn_implementation return_dict output_attentions output_hidden_states "
    "is_decoder is_encoder_decoder chunk_size_feed_forward id2label label2id problem_type".split()
)

# Keys that change the math in some model of the wider field -> the values with which they change nothing.
MATH_KEYS: Mapping[str, tuple[Any, ...]] = {
    key: neutral for keys, neutral in (
        ("attn_logit_softcapping final_logit_softcapping logit_softcapping query_pre_attn_scalar attention_multiplier "
         "clip_qkv attention_chunk_size text_config vision_config compression_config", (None,)),
        ("residual_multiplier embedding_multiplier logits_scaling logit_scale partial_rotary_factor", (None, 1, 1.0)),
        ("alibi use_mrope use_qk_norm qk_layernorm use_parallel_residual", (None, False)),
        ("num_experts num_local_experts n_routed_experts", (None, 0)),
        ("no_rope_layers", (None, [])),
    ) for key in keys.split()
}


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """The arguments of one dense decoder, complete: no default is left to the model file.

    attention_bias   q, k and v projections have a bias;  output_bias  so has o_proj
    qk_norm          RMS norm over head_dim of q and k before rotation
    dtype            what the checkpoint says it is stored in ("bfloat16", ...)
    notes            what a user should hear: ignored and unknown keys, one sentence each
    """

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: RopeArgs
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str
    eos_token_ids: tuple[int, ...] = ()
    notes: tuple[str, ...] = field(default=())


def read_checkpoint_config(folder: Path) -> ModelArgs:
    """Read `folder/config.json`. Raises ModelNotFound, ModelError (damaged) or UnsupportedModel, one line each."""
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFound(f"{path} does not exist: a model folder needs a config.json.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read ({error}): download it again.") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path} holds {type(raw).__name__}, not an object: download it again.")
    return parse_checkpoint_config(raw, str(path))


def parse_checkpoint_config(raw: Mapping[str, Any], source: str = "config.json") -> ModelArgs:
    """Turn the decoded config.json into `ModelArgs`; `source` names the file in errors."""
    keys = {key: value for key, value in raw.items()}
    model_type, family = _find_family(keys, source)
    _refuse_quantization(keys, source)
    _refuse_math(keys, source)
    hidden = _size(keys, "hidden_size", source)
    heads = _size(keys, "num_attention_heads", source)
    kv_heads = _kv_heads(keys, model_type, heads, source)
    max_positions = _size(keys, "max_position_embeddings", source)
    layers = _size(keys, "num_hidden_layers", source)
    _refuse_window(keys, family, max_positions, layers, source)
    rope, rope_notes = read_rope(keys, max_positions, source)
    bias = _flag(keys, "attention_bias", source) if "attention_bias" in family.keys else False
    mlp_bias = _flag(keys, "mlp_bias", source) if "mlp_bias" in family.keys else False
    dtype, dtype_notes = _dtype(keys, source)
    return ModelArgs(
        model_type=model_type,
        architecture=family.architecture,
        vocab_size=_size(keys, "vocab_size", source),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(keys, family, hidden, heads, source),
        intermediate_size=_size(keys, "intermediate_size", source),
        norm_eps=_positive(keys, "rms_norm_eps", 1e-6, source),
        rope=rope,
        attention_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        mlp_bias=mlp_bias if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        tie_word_embeddings=_flag(keys, "tie_word_embeddings", source),
        max_position_embeddings=max(max_positions, rope.extended_positions),
        dtype=dtype,
        eos_token_ids=_eos(keys, source),
        notes=(*_auto_map_note(keys), *rope_notes, *dtype_notes, *_unknown_note(keys, family)),
    )


def _find_family(keys: Mapping[str, Any], source: str) -> tuple[str, Family]:
    ours = ", ".join(f"{name} ({family.architecture})" for name, family in FAMILIES.items())
    architectures = _names(keys, "architectures", source)
    named = {family.architecture: name for name, family in FAMILIES.items()}
    model_type = keys.get("model_type") or (named.get(architectures[0]) if architectures else None)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        code = " Its auto_map points to code inside the repository, which is never run." if keys.get("auto_map") else ""
        shown = model_type or (architectures[0] if architectures else "nothing")
        raise UnsupportedModel(f"{source}: model_type {shown!r} is not implemented.{code} Implemented: {ours}.")
    family = FAMILIES[model_type]
    if architectures and family.architecture not in architectures:
        raise UnsupportedModel(f"{source}: architecture {architectures[0]!r} of model_type {model_type!r} is not "
                               f"implemented. Implemented: {ours}.")
    return model_type, family


def _refuse_quantization(keys: Mapping[str, Any], source: str) -> None:
    quantization = keys.get("quantization_config")
    if not quantization:
        return
    method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
    raise UnsupportedModel(f"{source}: quantization_config asks for {method!r}, which is not implemented yet: "
                           "use the unquantized checkpoint of this model.")


def _refuse_math(keys: Mapping[str, Any], source: str) -> None:
    activation = keys.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"{source}: hidden_act={activation!r} is not implemented (only 'silu').")
    for key, neutral in MATH_KEYS.items():
        if key in keys and keys[key] not in neutral:
            shown = repr(keys[key]) if not isinstance(keys[key], (dict, list)) else "{...}"
            raise UnsupportedModel(f"{source}: {key}={shown} changes the math and is not implemented.")


def _refuse_window(keys: Mapping[str, Any], family: Family, positions: int, layers: int, source: str) -> None:
    """Attention here is full; a window at least as long as the context changes nothing."""
    kinds = sorted(set(_names(keys, "layer_types", source)) - {"full_attention"})
    window = _count(keys, "sliding_window", family.default_window, source)
    active = window is not None and window < positions
    if family.window_flag:
        first = _count(keys, "max_window_layers", None, source)
        reached = bool(kinds) if keys.get("layer_types") else first is None or first < layers
        active = active and bool(keys.get("use_sliding_window")) and reached
    if active:
        default = "" if "sliding_window" in keys else f" (missing, which means {window})"
        raise UnsupportedModel(f"{source}: sliding_window={window}{default} is shorter than "
                               f"max_position_embeddings={positions}; sliding window attention is not implemented.")
    if kinds and not (family.window_flag and kinds == ["sliding_attention"]):
        raise UnsupportedModel(f"{source}: layer_types holds {kinds[0]!r}, which is not implemented.")


def _kv_heads(keys: Mapping[str, Any], model_type: str, heads: int, source: str) -> int:
    if keys.get("num_key_value_heads") is None and (model_type == "llama" or "num_key_value_heads" in keys):
        return heads
    kv_heads = _size(keys, "num_key_value_heads", source)
    if heads % kv_heads:
        raise ModelError(f"{source}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}.")
    return kv_heads


def _head_dim(keys: Mapping[str, Any], family: Family, hidden: int, heads: int, source: str) -> int:
    if keys.get("head_dim") is not None:
        head_dim = _size(keys, "head_dim", source)
    elif family.default_head_dim is not None and "head_dim" not in keys:
        head_dim = family.default_head_dim
    elif hidden % heads:
        raise ModelError(f"{source}: hidden_size={hidden} is not a multiple of num_attention_heads={heads}, and "
                         "head_dim is missing.")
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        raise ModelError(f"{source}: head_dim={head_dim} is odd; rotary positions need pairs.")
    return head_dim


def _checked(keys: Mapping[str, Any], key: str, source: str, fits: Callable[[Any], bool], what: str,
             default: Any = None) -> Any:
    value = keys.get(key, default)
    if not fits(value):
        raise ModelError(f"{source}: {key}={value!r} must be {what}.")
    return value


def _size(keys: Mapping[str, Any], key: str, source: str) -> int:
    if key not in keys:
        raise ModelError(f"{source}: {key} is missing; it must be a positive integer.")
    return int(_checked(keys, key, source, lambda value: type(value) is int and value > 0, "a positive integer"))


def _count(keys: Mapping[str, Any], key: str, default: int | None, source: str) -> int | None:
    """A number that may be switched off, by null or false."""
    value: int | None = _checked(keys, key, source, lambda value: value is None or value is False or type(value) is int,
                                 "an integer or null", default)
    return None if value is False else value


def _names(keys: Mapping[str, Any], key: str, source: str) -> list[str]:
    def fits(value: Any) -> bool:
        return not value or (isinstance(value, list) and all(isinstance(name, str) for name in value))

    return list(_checked(keys, key, source, fits, "a list of names") or ())


def _positive(keys: Mapping[str, Any], key: str, default: float, source: str) -> float:
    return float(_checked(keys, key, source, lambda value: type(value) in (int, float) and 0 < value <= MAX_NUMBER,
                          "a positive number", default))


def _flag(keys: Mapping[str, Any], key: str, source: str) -> bool:
    return bool(_checked(keys, key, source, lambda value: value is None or isinstance(value, bool), "true or false"))


def _dtype(keys: Mapping[str, Any], source: str) -> tuple[str, tuple[str, ...]]:
    value = keys.get("dtype", keys.get("torch_dtype"))
    if value is None:
        return "float32", ("config.json names no dtype: float32 is assumed",)
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(f"{source}: dtype={value!r} is not implemented (one of {', '.join(DTYPES)}).")
    return name, ()


def _eos(keys: Mapping[str, Any], source: str) -> tuple[int, ...]:
    value = keys.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise ModelError(f"{source}: eos_token_id={value!r} must be a token id or a list of token ids.")
    return tuple(ids)


def _auto_map_note(keys: Mapping[str, Any]) -> tuple[str, ...]:
    if not keys.get("auto_map"):
        return ()
    return (f"auto_map is ignored: {keys.get('model_type')} is built in, the repository's own code is never run",)


def _unknown_note(keys: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    unknown = sorted(set(keys) - KNOWN_KEYS - family.keys - set(MATH_KEYS))
    return (f"config.json has keys that are not known and were ignored: {', '.join(unknown)}",) if unknown else ()
