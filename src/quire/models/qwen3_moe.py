"""Qwen3-MoE (Alibaba): Qwen3 with experts in the feed-forward layers, none of them shared."""

from quire.models.names import DENSE, EXPERTS, OUTPUT_BIAS, QK_NORM, QKV_BIAS, STACKED_EXPERTS, NameMap

NAME_MAP: NameMap = (*DENSE, *QKV_BIAS, *OUTPUT_BIAS, *QK_NORM, *EXPERTS, *STACKED_EXPERTS)
