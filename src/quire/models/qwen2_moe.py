"""Qwen2-MoE (Alibaba): Qwen2 with experts and one shared expert, which a gate of its own weighs."""

from quire.models.names import DENSE, EXPERTS, QKV_BIAS, STACKED_EXPERTS, NameMap

NAME_MAP: NameMap = (
    *DENSE,
    *QKV_BIAS,
    *EXPERTS,
    *STACKED_EXPERTS,
    ("model.layers.{i}.mlp.shared_expert.gate_proj.weight", "layers.{i}.mlp.shared.gate_up.weight", "gate"),
    ("model.layers.{i}.mlp.shared_expert.up_proj.weight", "layers.{i}.mlp.shared.gate_up.weight", "up"),
    ("model.layers.{i}.mlp.shared_expert.down_proj.weight", "layers.{i}.mlp.shared.down.weight", ""),
    ("model.layers.{i}.mlp.shared_expert_gate.weight", "layers.{i}.mlp.shared_gate.weight", ""),
)
