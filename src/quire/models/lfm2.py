"""LFM2 and LFM2.5 (Liquid AI): short convolutions in most layers, attention in the others."""

from quire.models.names import NameMap

_AT = "model.layers.{i}."

LFM2: NameMap = (  # beside the feed-forward part
    ("model.embed_tokens.weight", "embed.weight", ""),
    ("model.embedding_norm.weight", "norm.weight", ""),
    ("lm_head.weight", "head.weight", ""),
    (f"{_AT}operator_norm.weight", "layers.{i}.attention_norm.weight", ""),
    (f"{_AT}ffn_norm.weight", "layers.{i}.mlp_norm.weight", ""),
    *((f"{_AT}self_attn.{side}_proj.weight", "layers.{i}.attention.qkv.weight", side) for side in "qkv"),
    *((f"{_AT}self_attn.{side}_layernorm.weight", f"layers.{{i}}.attention.head_norm.{side}", "") for side in "qk"),
    (f"{_AT}self_attn.out_proj.weight", "layers.{i}.attention.output.weight", ""),
    *(
        (f"{_AT}conv.in_proj.{part}", f"layers.{{i}}.conv.input.{part}", side)
        for part in ("weight", "bias")
        for side in "bcx"
    ),
    (f"{_AT}conv.conv.weight", "layers.{i}.conv.taps.conv", ""),
    (f"{_AT}conv.conv.bias", "layers.{i}.conv.taps.bias", ""),
    (f"{_AT}conv.out_proj.weight", "layers.{i}.conv.output.weight", ""),
    (f"{_AT}conv.out_proj.bias", "layers.{i}.conv.output.bias", ""),
    (f"{_AT}feed_forward.w1.weight", "layers.{i}.mlp.gate_up.weight", "gate"),
    (f"{_AT}feed_forward.w3.weight", "layers.{i}.mlp.gate_up.weight", "up"),
    (f"{_AT}feed_forward.w2.weight", "layers.{i}.mlp.down.weight", ""),
)
NAME_MAP: NameMap = LFM2
