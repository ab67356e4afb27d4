"""Rows of the name maps that the dense decoders of Hugging Face share: (checkpoint name, parameter, part)."""

from quire.layers.stack import NameMap

EMBEDDING_AND_HEAD: NameMap = (
    ("model.embed_tokens.weight", "embed.weight", ""),
    ("model.norm.weight", "norm.weight", ""),
    ("lm_head.weight", "head.weight", ""),
)
BLOCK_NORMS: NameMap = (
    ("model.layers.{i}.input_layernorm.weight", "layers.{i}.attention_norm.weight", ""),
    ("model.layers.{i}.post_attention_layernorm.weight", "layers.{i}.mlp_norm.weight", ""),
)
ATTENTION: NameMap = (
    ("model.layers.{i}.self_attn.q_proj.weight", "layers.{i}.attention.qkv.weight", "q"),
    ("model.layers.{i}.self_attn.k_proj.weight", "layers.{i}.attention.qkv.weight", "k"),
    ("model.layers.{i}.self_attn.v_proj.weight", "layers.{i}.attention.qkv.weight", "v"),
    ("model.layers.{i}.self_attn.o_proj.weight", "layers.{i}.attention.output.weight", ""),
)
QKV_BIAS: NameMap = (
    ("model.layers.{i}.self_attn.q_proj.bias", "layers.{i}.attention.qkv.bias", "q"),
    ("model.layers.{i}.self_attn.k_proj.bias", "layers.{i}.attention.qkv.bias", "k"),
    ("model.layers.{i}.self_attn.v_proj.bias", "layers.{i}.attention.qkv.bias", "v"),
)
OUTPUT_BIAS: NameMap = (("model.layers.{i}.self_attn.o_proj.bias", "layers.{i}.attention.output.bias", ""),)
QK_NORM: NameMap = (
    ("model.layers.{i}.self_attn.q_norm.weight", "layers.{i}.attention.q_norm.weight", ""),
    ("model.layers.{i}.self_attn.k_norm.weight", "layers.{i}.attention.k_norm.weight", ""),
)
GATED_MLP: NameMap = (
    ("model.layers.{i}.mlp.gate_proj.weight", "layers.{i}.mlp.gate_up.weight", "gate"),
    ("model.layers.{i}.mlp.up_proj.weight", "layers.{i}.mlp.gate_up.weight", "up"),
    ("model.layers.{i}.mlp.down_proj.weight", "layers.{i}.mlp.down.weight", ""),
)
MLP_BIAS: NameMap = (
    ("model.layers.{i}.mlp.gate_proj.bias", "layers.{i}.mlp.gate_up.bias", "gate"),
    ("model.layers.{i}.mlp.up_proj.bias", "layers.{i}.mlp.gate_up.bias", "up"),
    ("model.layers.{i}.mlp.down_proj.bias", "layers.{i}.mlp.down.bias", ""),
)
