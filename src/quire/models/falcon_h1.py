"""Falcon-H1 (TII): attention and Mamba 2 beside each other in every layer, and factors at most projections."""

from quire.models.names import ATTENTION, MAMBA, OUTPUT_BIAS, QKV_BIAS, NameMap, renamed

_AT = "model.layers.{i}."

NAME_MAP: NameMap = (
    ("model.embed_tokens.weight", "embed.weight", ""),
    ("model.final_layernorm.weight", "norm.weight", ""),
    ("lm_head.weight", "head.weight", ""),
    (f"{_AT}input_layernorm.weight", "layers.{i}.attention_norm.weight", ""),
    (f"{_AT}pre_ff_layernorm.weight", "layers.{i}.mlp_norm.weight", ""),
    *ATTENTION,
    *QKV_BIAS,
    *OUTPUT_BIAS,
    *renamed(f"{_AT}mamba.", MAMBA),
    *(
        (f"{_AT}feed_forward.{side}_proj.{part}", f"layers.{{i}}.mlp.gate_up.{part}", side)
        for part in ("weight", "bias")
        for side in ("gate", "up")
    ),
    (f"{_AT}feed_forward.down_proj.weight", "layers.{i}.mlp.down.weight", ""),
    (f"{_AT}feed_forward.down_proj.bias", "layers.{i}.mlp.down.bias", ""),
)
