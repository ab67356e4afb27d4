"""Granite 4 (IBM) with attention alone: as Granite 3, with gate and up in one tensor of the shared MLP."""

from quire.models.names import ATTENTION, BLOCK_NORMS, EMBEDDING_AND_HEAD, OUTPUT_BIAS, QKV_BIAS, NameMap

_AT = "model.layers.{i}.shared_mlp."

NAME_MAP: NameMap = (
    *EMBEDDING_AND_HEAD,
    *BLOCK_NORMS,
    *ATTENTION,
    *QKV_BIAS,
    *OUTPUT_BIAS,
    (f"{_AT}input_linear.weight", "layers.{i}.mlp.gate_up.weight", "gate"),
    (f"{_AT}input_linear.weight", "layers.{i}.mlp.gate_up.weight", "up"),
    (f"{_AT}output_linear.weight", "layers.{i}.mlp.down.weight", ""),
)
