"""Granite 4 (IBM): Mamba 2 in most layers or none, attention in the others; a shared MLP, alone or beside experts."""

from quire.models.names import (
    ATTENTION,
    BLOCK_NORMS,
    EMBEDDING_AND_HEAD,
    MAMBA,
    OUTPUT_BIAS,
    QKV_BIAS,
    NameMap,
    renamed,
)

_AT = "model.layers.{i}."
_SHARED = f"{_AT}shared_mlp."
_EXPERTS = f"{_AT}block_sparse_moe."

NAME_MAP: NameMap = (
    *EMBEDDING_AND_HEAD,
    *BLOCK_NORMS,
    *ATTENTION,
    *QKV_BIAS,
    *OUTPUT_BIAS,
    *renamed(f"{_AT}mamba.", MAMBA),
    (f"{_SHARED}input_linear.weight", "layers.{i}.mlp.gate_up.weight", "gate"),
    (f"{_SHARED}input_linear.weight", "layers.{i}.mlp.gate_up.weight", "up"),
    (f"{_SHARED}output_linear.weight", "layers.{i}.mlp.down.weight", ""),
    (f"{_SHARED}input_linear.weight", "layers.{i}.mlp.shared.gate_up.weight", "gate"),
    (f"{_SHARED}input_linear.weight", "layers.{i}.mlp.shared.gate_up.weight", "up"),
    (f"{_SHARED}output_linear.weight", "layers.{i}.mlp.shared.down.weight", ""),
    (f"{_EXPERTS}router.layer.weight", "layers.{i}.mlp.router.weight", ""),
    (f"{_EXPERTS}input_linear.weight", "layers.{i}.mlp.experts.gate_up", "rows"),
    (f"{_EXPERTS}output_linear.weight", "layers.{i}.mlp.experts.down", "rows"),
)
