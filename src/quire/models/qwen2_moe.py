"""Qwen2-MoE (Alibaba): Qwen2 with experts and one shared expert, which a gate of its own weighs."""

from quire.models import names
from quire.models.names import NameMap

NAME_MAP: NameMap = (
    *names.EMBEDDING_AND_HEAD,
    *names.BLOCK_NORMS,
    *names.ATTENTION,
    *names.QKV_BIAS,
    *names.GATED_MLP,
    *names.EXPERTS,
    ("model.layers.{i}.mlp.shared_expert.gate_proj.weight", "layers.{i}.mlp.shared.gate_up.weight", "gate"),
    ("model.layers.{i}.mlp.shared_expert.up_proj.weight", "layers.{i}.mlp.shared.gate_up.weight", "up"),
    ("model.layers.{i}.mlp.shared_expert.down_proj.weight", "layers.{i}.mlp.shared.down.weight", ""),
    ("model.layers.{i}.mlp.shared_expert_gate.weight", "layers.{i}.mlp.shared_gate.weight", ""),
)
