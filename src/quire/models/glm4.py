"""GLM-4 (Zhipu), dense: norms before and after each half, half of each head rotated, gate and up in one tensor."""

from quire.models.names import ATTENTION, EMBEDDING_AND_HEAD, FUSED_GATED_MLP, QKV_BIAS, NameMap

NAME_MAP: NameMap = (
    *EMBEDDING_AND_HEAD,
    ("model.layers.{i}.input_layernorm.weight", "layers.{i}.attention_norm.weight", ""),
    ("model.layers.{i}.post_self_attn_layernorm.weight", "layers.{i}.attention_after.weight", ""),
    ("model.layers.{i}.post_attention_layernorm.weight", "layers.{i}.mlp_norm.weight", ""),
    ("model.layers.{i}.post_mlp_layernorm.weight", "layers.{i}.mlp_after.weight", ""),
    *ATTENTION,
    *QKV_BIAS,
    *FUSED_GATED_MLP,
)
