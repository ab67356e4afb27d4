"""Reader of grouped-query attention in config.json. No torch."""

from quire.args.families import Family
from quire.args.keys import Keys
from quire.args.layers import GroupedArgs
from quire.args.rope import RopeArgs, rope_settings


def read_grouped(keys: Keys, family: Family, rope: RopeArgs) -> GroupedArgs:
    """Return the grouped-query attention that config.json describes. Raises ModelError or UnsupportedModel."""
    heads, own = keys.size("num_attention_heads"), family.heads
    kv_heads = _kv_heads(keys, family, heads)
    head_dim = _head_dim(keys, family, keys.size("hidden_size"), heads)
    bias, of_output = (
        keys.flag(key, family.biased and key == "attention_bias") if key in family.keys else False
        for key in ("attention_bias", family.output_key)
    )
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
        qk_norm="head" * keys.flag("use_qk_norm") if own.qk_norm is None else own.qk_norm,
        scale=_scale(keys, family),
        soft_cap=read_cap(keys, family, "attn_logit_softcapping", own.soft_cap),
        sinks=own.sinks,
        interleaved=own.interleaved,
    )


def _scale(keys: Keys, family: Family) -> float:
    if "query_pre_attn_scalar" in family.keys:
        return float(keys.positive("query_pre_attn_scalar", 256.0) ** -0.5)
    return keys.positive("attention_multiplier", 1.0) if "attention_multiplier" in family.keys else 0.0


def read_cap(keys: Keys, family: Family, key: str, default: float | None) -> float | None:
    """Return the value of a cap that the family reads; None: there is no cap."""
    if key not in family.keys or keys.get(key, default) is None:
        return None
    return keys.positive(key, default)


def _rotary_dim(keys: Keys, family: Family, head_dim: int, rope: RopeArgs) -> int:
    """Return the number of rotated dimensions of a head. Their two halves come first in the checkpoint."""
    nested = rope_settings(keys)
    if "rotary_dim" in family.keys and keys.get("rotary_dim") is not None and "partial_rotary_factor" not in nested:
        nested = {**nested, "partial_rotary_factor": keys.size("rotary_dim", most=head_dim) / head_dim}
    if "partial_rotary_factor" not in family.keys:
        if nested.get("partial_rotary_factor", 1) not in (None, 1, 1.0):
            raise keys.unsupported(
                f"partial_rotary_factor={nested['partial_rotary_factor']} is not implemented for "
                "this family: use another model."
            )
        return head_dim
    part = Keys({**keys, **nested}, keys.source).positive("partial_rotary_factor", family.rotated)
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
