"""Reader of grouped-query attention in config.json. No torch."""

from typing import Any

from quire.args.families import Family
from quire.args.keys import Keys
from quire.args.layers import MOST_GROWTH_STEPS, GroupedArgs, ScoreArgs
from quire.args.multipliers import score_factor
from quire.args.rope import RopeArgs, rope_settings


def read_grouped(keys: Keys, family: Family, rope: RopeArgs, *, full: bool) -> GroupedArgs:
    """Return the grouped-query attention of a kind of layers. Raises ModelError or UnsupportedModel.

    full   True: of layers with full attention; False: of those with a window
    """
    if full and family.heads.by_kind:
        keys = _of_full_layers(keys)
    heads, own = keys.size("num_attention_heads"), family.heads
    kv_heads = _kv_heads(keys, family, heads)
    head_dim = _head_dim(keys, family, keys.size("hidden_size"), heads)
    bias, of_output = (
        keys.flag(key, family.biased and key == "attention_bias") if key in family.keys else False
        for key in ("attention_bias", family.output_key)
    )
    if own.settings and not rope_settings(keys):
        raise keys.wrong("rope_scaling and rope_parameters are missing: take the config.json of the published model.")
    rotated = _rotary_dim(keys, family, head_dim, rope)
    if any(len(one) != rotated // 2 for one in rope.divisors):
        raise keys.wrong(
            f"short_factor and long_factor need a number for each of {rotated // 2} pairs: correct the file."
        )
    return GroupedArgs(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotated,
        rope=rope,
        input_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=of_output if family.output_bias is None else family.output_bias,
        qk_norm=_head_norm(keys, family, rope),
        scores=ScoreArgs(
            scale=own.scale or _scale(keys, family, head_dim),
            soft_cap=read_cap(keys, family, "attn_logit_softcapping", own.soft_cap),
            sinks=own.sinks,
            **_growth(keys, family, rope),
        ),
        interleaved=own.interleaved,
        values="keys" if full and keys.flag("attention_k_eq_v") and own.by_kind else own.values,
        gated=own.gated and keys.flag("attn_output_gate", True),
    )


def _of_full_layers(keys: Keys) -> Keys:
    """Return the keys with the sizes of heads in layers with full attention.

    Published files have them as global_head_dim and num_global_key_value_heads, files of transformers 5 in
    per_layer_config, by the number of the layer.
    """
    own = {"head_dim": keys.size("global_head_dim", 512)}
    if keys.flag("attention_k_eq_v") and keys.get("num_global_key_value_heads") is not None:
        own["num_key_value_heads"] = keys.size("num_global_key_value_heads")
    if (layers := keys.object("per_layer_config")) is not None:
        own = _alike(keys, layers)
    return Keys({**keys, **own}, keys.source)


def _alike(keys: Keys, layers: dict[str, Any]) -> dict[str, int]:
    """Return the sizes of per_layer_config, which must be those of all layers with full attention and of no others."""
    kinds = keys.names("layer_types")
    first: Any = next(iter(layers.values()), {})
    full = [str(layer) for layer, kind in enumerate(kinds) if kind == "full_attention" or layer == len(kinds) - 1]
    numbers = [layer.lstrip("0") or "0" for layer in layers]  # transformers writes "05" in a model of more than ten
    every = not layers or (sorted(numbers) == sorted(full) and all(one == first for one in layers.values()))
    if not every or not isinstance(first, dict) or set(first) - {"head_dim", "num_key_value_heads"}:
        raise keys.unsupported(
            "per_layer_config is implemented with the same head_dim and num_key_value_heads for all layers of full "
            "attention, and for no others: use another model."
        )
    return {key: Keys(first, f"{keys.source}: per_layer_config").size(key) for key in first}


def _scale(keys: Keys, family: Family, head_dim: int) -> float:
    if family.form.both:
        return float(score_factor(keys) * head_dim**-0.5)
    if "query_pre_attn_scalar" in family.keys:
        return float(keys.positive("query_pre_attn_scalar", 256.0) ** -0.5)
    return keys.positive("attention_multiplier", 1.0) if "attention_multiplier" in family.keys else 0.0


def _head_norm(keys: Keys, family: Family, rope: RopeArgs) -> str:
    norm = family.heads.qk_norm
    if norm is None:
        return "head" * keys.flag("use_qk_norm")
    if norm != "plain" or not keys.flag("use_qk_norm", True):
        return norm * (norm != "plain")
    if rope.kind in ("yarn", "longrope"):  # its factor would be undone by a norm after the rotation
        raise keys.unsupported(f"use_qk_norm with rope type {rope.kind!r} is not implemented: use another model.")
    return norm


def _growth(keys: Keys, family: Family, rope: RopeArgs) -> dict[str, Any]:
    """Return growth, trained and ahead of `ScoreArgs`. A family whose rotary settings have the growth must name it."""
    if family.heads.grow == "all":
        settings = Keys(rope_settings(keys), f"{keys.source}: rope settings")
        return {"growth": settings.positive("llama_4_scaling_beta"), "trained": rope.original_max_position}
    if not family.heads.grow or not _tunes(keys):
        return {"trained": rope.original_max_position}
    trained, context = keys.size("floor_scale", 8192), keys.size("max_position_embeddings")
    if trained * MOST_GROWTH_STEPS <= context:
        raise keys.unsupported(
            f"floor_scale={trained} with max_position_embeddings={context} is not implemented, only up to "
            f"{MOST_GROWTH_STEPS} times as many: use another model."
        )
    return {"growth": keys.positive("attn_scale", 0.1), "trained": trained, "ahead": 1}


def _tunes(keys: Keys) -> bool:
    """True unless attn_temperature_tuning is off. The first published files of Llama 4 have the number 4 there."""
    fits = lambda value: value is None or isinstance(value, bool | int)  # noqa: E731
    return bool(keys.checked("attn_temperature_tuning", fits, "true or false", True))


def read_cap(keys: Keys, family: Family, key: str, default: float | None) -> float | None:
    """Return the value of a cap that the family reads; None: there is no cap."""
    if key not in family.keys or keys.get(key, default) is None:
        return None
    return keys.positive(key, default)


def _rotary_dim(keys: Keys, family: Family, head_dim: int, rope: RopeArgs) -> int:
    """Return the number of rotated dimensions of a head. Their two halves come first in the checkpoint."""
    nested = rope_settings(keys)
    if rope.kind == "proportional":
        return head_dim
    if "rotary_dim" in family.keys and keys.get("rotary_dim") is not None and "partial_rotary_factor" not in nested:
        nested = {**nested, "partial_rotary_factor": keys.size("rotary_dim", most=head_dim) / head_dim}
    if "partial_rotary_factor" not in family.keys:
        if nested.get("partial_rotary_factor", 1) not in (None, 1, 1.0):
            raise keys.unsupported(
                f"partial_rotary_factor={nested['partial_rotary_factor']} is not implemented for "
                "this family: use another model."
            )
        return head_dim
    part = Keys({**keys, **nested}, keys.source).positive("partial_rotary_factor", family.heads.rotated)
    rotated = int(head_dim * part)
    if rotated % 2 or not 0 < rotated <= head_dim or (rotated < head_dim and rope.kind == "yarn"):
        raise keys.unsupported(
            f"partial_rotary_factor={part} of {head_dim} dimensions is not implemented "
            f"with rope type {rope.kind!r}: use another model."
        )
    return rotated


def _kv_heads(keys: Keys, family: Family, heads: int) -> int:
    if keys.get("num_key_value_heads") is None and (family.heads.one_kv_each or "num_key_value_heads" in keys):
        return heads
    kv_heads = keys.size("num_key_value_heads")
    if heads % kv_heads:
        raise keys.wrong(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}: correct the file."
        )
    return kv_heads


def _head_dim(keys: Keys, family: Family, hidden: int, heads: int) -> int:
    if keys.get("head_dim") is not None:
        head_dim = keys.size("head_dim")
    elif family.heads.dim is not None and "head_dim" not in keys:
        head_dim = family.heads.dim
    elif hidden % heads:
        raise keys.wrong(
            f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}, and "
            "head_dim is missing: correct the file."
        )
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        raise keys.wrong(f"head_dim={head_dim} is odd, and rotary positions need pairs: correct the file.")
    return head_dim
