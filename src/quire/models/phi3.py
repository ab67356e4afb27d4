"""Phi-3 and Phi-4 (Microsoft): as Llama; q, k and v lie in one tensor, gate and up in another."""

from quire.models.names import BLOCK_NORMS, EMBEDDING_AND_HEAD, FUSED_GATED_MLP, NameMap

NAME_MAP: NameMap = (
    *EMBEDDING_AND_HEAD,
    *BLOCK_NORMS,
    ("model.layers.{i}.self_attn.qkv_proj.weight", "layers.{i}.attention.qkv.weight", "q"),
    ("model.layers.{i}.self_attn.qkv_proj.weight", "layers.{i}.attention.qkv.weight", "k"),
    ("model.layers.{i}.self_attn.qkv_proj.weight", "layers.{i}.attention.qkv.weight", "v"),
    ("model.layers.{i}.self_attn.o_proj.weight", "layers.{i}.attention.output.weight", ""),
    *FUSED_GATED_MLP,
)
