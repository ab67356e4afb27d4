"""Qwen3 (Alibaba): q and k are normalized per head before rotation; biases only where the config asks."""

from quire.models.names import DENSE, OUTPUT_BIAS, QK_NORM, QKV_BIAS, NameMap

NAME_MAP: NameMap = (*DENSE, *QKV_BIAS, *OUTPUT_BIAS, *QK_NORM)
