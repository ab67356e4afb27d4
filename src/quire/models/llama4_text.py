"""Llama 4 (Meta), its language model: experts of some layers, with their input weighed by the router.

Published files have the experts of a layer in one tensor; quantized ones store each expert by itself.
"""

from quire.models.names import ATTENTION, BLOCK_NORMS, EMBEDDING_AND_HEAD, OUTPUT_BIAS, QKV_BIAS, NameMap

_AT = "model.layers.{i}.feed_forward."

NAME_MAP: NameMap = (
    *EMBEDDING_AND_HEAD,
    *BLOCK_NORMS,
    *ATTENTION,
    *QKV_BIAS,
    *OUTPUT_BIAS,
    (f"{_AT}gate_proj.weight", "layers.{i}.mlp.gate_up.weight", "gate"),
    (f"{_AT}up_proj.weight", "layers.{i}.mlp.gate_up.weight", "up"),
    (f"{_AT}down_proj.weight", "layers.{i}.mlp.down.weight", ""),
    (f"{_AT}router.weight", "layers.{i}.mlp.router.weight", ""),
    (f"{_AT}shared_expert.gate_proj.weight", "layers.{i}.mlp.shared.gate_up.weight", "gate"),
    (f"{_AT}shared_expert.up_proj.weight", "layers.{i}.mlp.shared.gate_up.weight", "up"),
    (f"{_AT}shared_expert.down_proj.weight", "layers.{i}.mlp.shared.down.weight", ""),
    (f"{_AT}experts.gate_up_proj", "layers.{i}.mlp.experts.gate_up", "columns"),
    (f"{_AT}experts.down_proj", "layers.{i}.mlp.experts.down", "columns"),
    (f"{_AT}experts.{{e}}.gate_proj.weight", "layers.{i}.mlp.experts.gate_up", "{e}.gate"),
    (f"{_AT}experts.{{e}}.up_proj.weight", "layers.{i}.mlp.experts.gate_up", "{e}.up"),
    (f"{_AT}experts.{{e}}.down_proj.weight", "layers.{i}.mlp.experts.down", "{e}."),
)
