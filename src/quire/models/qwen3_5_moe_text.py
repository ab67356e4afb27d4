"""Qwen3.5-MoE (Alibaba), its language model: as Qwen3.5, with experts, of which one is shared and has a gate."""

from quire.models.names import EXPERTS, SHARED_EXPERT, STACKED_EXPERTS, NameMap
from quire.models.qwen3_5_text import NAME_MAP as QWEN3_5

NAME_MAP: NameMap = (*QWEN3_5, *EXPERTS, *STACKED_EXPERTS, *SHARED_EXPERT)
