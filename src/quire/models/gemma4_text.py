"""Gemma 4 (Google), text: as Gemma 3, with larger heads in full layers, whose values are those of keys.

Some sizes have experts beside the MLP of each layer, others an embedding of each token for each layer.
"""

from quire.models.gemma3_text import NAME_MAP as GEMMA3
from quire.models.names import NameMap

_AT = "model.layers.{i}."

NAME_MAP: NameMap = (
    *GEMMA3,
    ("model.embed_tokens_per_layer.weight", "inputs.embed.weight", ""),
    ("model.per_layer_model_projection.weight", "inputs.project.weight", ""),
    ("model.per_layer_projection_norm.weight", "inputs.norm.weight", ""),
    (f"{_AT}per_layer_input_gate.weight", "layers.{i}.input.gate.weight", ""),
    (f"{_AT}per_layer_projection.weight", "layers.{i}.input.project.weight", ""),
    (f"{_AT}post_per_layer_input_norm.weight", "layers.{i}.input_after.weight", ""),
    (f"{_AT}layer_scalar", "layers.{i}.factor.weight", ""),
    (f"{_AT}post_feedforward_layernorm_1.weight", "layers.{i}.mlp.dense_after.weight", ""),
    (f"{_AT}pre_feedforward_layernorm_2.weight", "layers.{i}.mlp.experts_norm.weight", ""),
    (f"{_AT}post_feedforward_layernorm_2.weight", "layers.{i}.mlp.experts_after.weight", ""),
    (f"{_AT}router.scale", "layers.{i}.mlp.router.scale", ""),
    (f"{_AT}router.proj.weight", "layers.{i}.mlp.router.weight", ""),
    (f"{_AT}router.per_expert_scale", "layers.{i}.mlp.router.expert_scale", ""),
    (f"{_AT}experts.{{e}}.gate_proj.weight", "layers.{i}.mlp.experts.gate_up", "{e}.gate"),
    (f"{_AT}experts.{{e}}.up_proj.weight", "layers.{i}.mlp.experts.gate_up", "{e}.up"),
    (f"{_AT}experts.{{e}}.down_proj.weight", "layers.{i}.mlp.experts.down", "{e}."),
    (f"{_AT}experts.gate_up_proj", "layers.{i}.mlp.experts.gate_up", "rows"),
    (f"{_AT}experts.down_proj", "layers.{i}.mlp.experts.down", "rows"),
)
