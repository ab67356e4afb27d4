"""Command R7B and A (Cohere): one norm before both halves of a layer; full layers have no rotation."""

from quire.models.names import ATTENTION, EMBEDDING_AND_HEAD, GATED_MLP, OUTPUT_BIAS, QKV_BIAS, NameMap

NAME_MAP: NameMap = (
    *EMBEDDING_AND_HEAD,
    ("model.layers.{i}.input_layernorm.weight", "layers.{i}.norm.weight", ""),
    *ATTENTION,
    *QKV_BIAS,
    *OUTPUT_BIAS,
    *GATED_MLP,
)
