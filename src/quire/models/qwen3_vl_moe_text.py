"""Qwen3-VL-MoE (Alibaba), its language model: as Qwen3-MoE, with the experts of a layer in one tensor.

Published files have it transposed; files that transformers 5 writes do not.
"""

from quire.models.names import DENSE, EXPERTS, OUTPUT_BIAS, QK_NORM, QKV_BIAS, STACKED_EXPERTS, NameMap

NAME_MAP: NameMap = (
    *DENSE,
    *QKV_BIAS,
    *OUTPUT_BIAS,
    *QK_NORM,
    *EXPERTS,
    *((stored, parameter, "columns") for stored, parameter, _ in STACKED_EXPERTS),
    *STACKED_EXPERTS,
)
