"""Qwen2 and Qwen2.5 (Alibaba): biases on q, k and v, none on the output."""

from quire.models.names import DENSE, QKV_BIAS, NameMap

NAME_MAP: NameMap = (*DENSE, *QKV_BIAS)
