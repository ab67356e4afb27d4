"""Keys of config.json that a family spells in its own way, or from which it derives others. No torch."""

from collections.abc import Callable, Mapping
from typing import Any

from quire.args.families import Family
from quire.args.keys import Keys
from quire.args.rope import rope_settings

FULL, SLIDING = "full_attention", "sliding_attention"


def respelled(keys: Keys, model_type: str, family: Family) -> Keys:
    """Return the keys of a family as those that all families have. Raises ModelError."""
    more: dict[str, Any] = {}
    if family.heads.by_kind and keys.get("rope_parameters") is None:
        full = {"rope_type": "proportional", "rope_theta": family.theta, "partial_rotary_factor": family.heads.rotated}
        more["rope_parameters"] = {FULL: full, SLIDING: {"rope_theta": family.window.theta}}
    if model_type in SPELLINGS:
        more |= SPELLINGS[model_type](keys)
    return Keys({**keys, **more}, keys.source) if more else keys


def _lfm2(keys: Keys) -> dict[str, Any]:
    """Return tie_word_embeddings and intermediate_size. The width of an MLP is derived from the stated one."""
    tied = {"tie_word_embeddings": keys["tie_embedding"]} if "tie_embedding" in keys else {}
    width = keys.size("block_ff_dim" if "block_ff_dim" in keys else "intermediate_size", 12_288)
    if keys.flag("block_auto_adjust_ff_dim", True):
        unit, width = keys.size("block_multiple_of", 256), int(2 * width / 3)
        if keys.get("block_ffn_dim_multiplier", 1.0) is not None:
            width = int(keys.positive("block_ffn_dim_multiplier", 1.0) * width)
            width = -(-width // unit) * unit
    return tied | {"intermediate_size": width}


def _lfm2_moe(keys: Keys) -> dict[str, Any]:
    return {"tie_word_embeddings": keys["tie_embedding"]} if "tie_embedding" in keys else {}


PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _nemotron(keys: Keys) -> dict[str, Any]:
    """Return layer_types, their number, hidden_act and tie_word_embeddings, which transformers does not follow.

    Without layers_block_type a text has a sign for each layer.
    """
    named = keys.names("layers_block_type") or keys.names("layer_types")
    if not named:
        fits = lambda value: isinstance(value, str) and bool(value) and set(value) <= PATTERN.keys()  # noqa: E731
        text = keys.checked("hybrid_override_pattern", fits, f"a text of the signs {' '.join(PATTERN)}")
        named = [PATTERN[sign] for sign in text]
    act = keys.get("mlp_hidden_act") or "relu2"
    sizes = {"layer_types": named, "num_hidden_layers": len(named)}
    return sizes | {"hidden_act": act, "tie_word_embeddings": False}


def _falcon(keys: Keys) -> dict[str, Any]:
    """Return no layer_types, since all layers are alike."""
    if set(keys.names("layer_types") + keys.names("layers_block_type")) - {"hybrid"}:
        raise keys.unsupported('layer_types other than "hybrid" are not implemented: use another model.')
    return {"layer_types": None}


def _olmo_hybrid(keys: Keys) -> dict[str, Any]:
    """Return position_embedding_type. A rope_theta of null says that no head is rotated, as in published files."""
    settings = rope_settings(keys)
    named = settings if "rope_theta" in settings else keys
    if named.get("rope_theta", 0) is not None:
        return {"position_embedding_type": "rope"}
    return {"position_embedding_type": "nope", "rope_theta": None, "rope_parameters": None, "rope_scaling": None}


KDA = {  # keys of layers with Kimi delta attention -> their names in linear_attn_config
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
    "linear_lower_bound": "gate_lower_bound",
}


def _kimi(keys: Keys) -> dict[str, Any]:
    """Return the context length, the sizes of recurrent layers, and q_lora_rank, which may be missing.

    Also tie_word_embeddings, which transformers does not follow.
    """
    if not keys.flag("mla_use_nope", True):
        raise keys.unsupported("mla_use_nope=false is not implemented: use a model whose heads are not rotated.")
    inner = keys.object("linear_attn_config") or {}
    found = {own: inner[theirs] for own, theirs in KDA.items() if theirs in inner}
    if "model_max_length" in keys:
        found["max_position_embeddings"] = keys["model_max_length"]
    return {"q_lora_rank": keys.get("q_lora_rank"), "tie_word_embeddings": False} | found


def _indexed(keys: Keys) -> dict[str, Any]:
    """Return no layer_types, since all layers are alike."""
    if other := set(keys.names("layer_types")) - {"indexed_attention", "deepseek_sparse_attention"}:
        raise keys.unsupported(f"layer_types holds {min(other)!r}, which is not implemented: use another model.")
    return {"layer_types": None}


SPELLINGS: Mapping[str, Callable[[Keys], dict[str, Any]]] = {
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "nemotron_h": _nemotron,
    "falcon_h1": _falcon,
    "olmo_hybrid": _olmo_hybrid,
    "kimi_linear": _kimi,
    "deepseek_v32": _indexed,
    "glm_moe_dsa": _indexed,
}
