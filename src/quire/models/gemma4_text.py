"""Gemma 4 (Google), text: as Gemma 3, with larger heads in full layers, whose values are those of keys.

Some sizes have experts beside the MLP of each layer.
"""

from quire.models.gemma3_text import NAME_MAP as GEMMA3
from quire.models.names import NameMap

_AT = "model.layers.{i}."

NAME_MAP: NameMap = (
    *GEMMA3,
    (f"{_AT}layer_scalar", "layers.{i}.factor.weight", ""),
    (f"{_AT}post_feedforward_layernorm_1.weight", "layers.{i}.mlp.dense_after.weight", ""),
    (f"{_AT}pre_feedforward_layernorm_2.weight", "layers.{i}.mlp.experts_norm.weight", ""),
    (f"{_AT}post_feedforward_layernorm_2.weight", "layers.{i}.mlp.experts_after.weight", ""),
    (f"{_AT}router.scale", "layers.{i}.mlp.router_norm.weight", ""),
    (f"{_AT}router.proj.weight", "layers.{i}.mlp.router.weight", ""),
    (f"{_AT}router.per_expert_scale", "layers.{i}.mlp.router.factors", ""),
    (f"{_AT}experts.{{e}}.gate_proj.weight", "layers.{i}.mlp.experts.gate_up", "{e}.gate"),
    (f"{_AT}experts.{{e}}.up_proj.weight", "layers.{i}.mlp.experts.gate_up", "{e}.up"),
    (f"{_AT}experts.{{e}}.down_proj.weight", "layers.{i}.mlp.experts.down", "{e}."),
    (f"{_AT}experts.gate_up_proj", "layers.{i}.mlp.experts.gate_up", "rows"),
    (f"{_AT}experts.down_proj", "layers.{i}.mlp.experts.down", "rows"),
)
