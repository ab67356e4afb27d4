"""LFM2 with experts (Liquid AI): as LFM2, with experts in all layers but the first ones."""

from quire.models.lfm2 import LFM2
from quire.models.names import NameMap

_AT = "model.layers.{i}.feed_forward."

NAME_MAP: NameMap = (
    *LFM2,
    (f"{_AT}gate.weight", "layers.{i}.mlp.router.weight", ""),
    (f"{_AT}expert_bias", "layers.{i}.mlp.router.correction", ""),
    (f"{_AT}experts.{{e}}.w1.weight", "layers.{i}.mlp.experts.gate_up", "{e}.gate"),
    (f"{_AT}experts.{{e}}.w3.weight", "layers.{i}.mlp.experts.gate_up", "{e}.up"),
    (f"{_AT}experts.{{e}}.w2.weight", "layers.{i}.mlp.experts.down", "{e}."),
)
