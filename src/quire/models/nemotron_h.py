"""Nemotron-H and Nemotron 3 Nano (NVIDIA): layers that are Mamba 2, attention, an MLP or experts alone."""

from quire.models.names import MAMBA, NameMap, renamed

_AT = "backbone.layers.{i}.mixer."

NAME_MAP: NameMap = (
    ("backbone.embeddings.weight", "embed.weight", ""),
    ("backbone.norm_f.weight", "norm.weight", ""),
    ("lm_head.weight", "head.weight", ""),
    ("backbone.layers.{i}.norm.weight", "layers.{i}.attention_norm.weight", ""),
    ("backbone.layers.{i}.norm.weight", "layers.{i}.mlp_norm.weight", ""),
    *renamed(_AT, MAMBA),
    *((f"{_AT}{side}_proj.weight", "layers.{i}.attention.qkv.weight", side) for side in "qkv"),
    (f"{_AT}o_proj.weight", "layers.{i}.attention.output.weight", ""),
    (f"{_AT}up_proj.weight", "layers.{i}.mlp.gate_up.weight", "up"),
    (f"{_AT}up_proj.bias", "layers.{i}.mlp.gate_up.bias", "up"),
    (f"{_AT}down_proj.weight", "layers.{i}.mlp.down.weight", ""),
    (f"{_AT}down_proj.bias", "layers.{i}.mlp.down.bias", ""),
    (f"{_AT}gate.weight", "layers.{i}.mlp.router.weight", ""),
    (f"{_AT}gate.e_score_correction_bias", "layers.{i}.mlp.router.correction", ""),
    (f"{_AT}experts.{{e}}.up_proj.weight", "layers.{i}.mlp.experts.gate_up", "{e}.up"),
    (f"{_AT}experts.{{e}}.down_proj.weight", "layers.{i}.mlp.experts.down", "{e}."),
    (f"{_AT}shared_experts.up_proj.weight", "layers.{i}.mlp.shared.gate_up.weight", "up"),
    (f"{_AT}shared_experts.down_proj.weight", "layers.{i}.mlp.shared.down.weight", ""),
)
