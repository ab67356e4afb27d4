"""Qwen2-MoE (Alibaba): Qwen2 with experts and one shared expert, which a gate of its own weighs."""

from quire.models.names import DENSE, EXPERTS, QKV_BIAS, SHARED_EXPERT, STACKED_EXPERTS, NameMap

NAME_MAP: NameMap = (*DENSE, *QKV_BIAS, *EXPERTS, *STACKED_EXPERTS, *SHARED_EXPERT)
