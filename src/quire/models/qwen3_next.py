"""Qwen3-Next (Alibaba): gated delta nets in three of four layers, gated attention, experts with a shared one."""

from quire.models.names import (
    DELTA_TOGETHER,
    DENSE,
    EXPERTS,
    GATED_DELTA,
    MTP,
    OUTPUT_BIAS,
    QK_NORM,
    QKV_BIAS,
    SHARED_EXPERT,
    STACKED_EXPERTS,
    NameMap,
)

NAME_MAP: NameMap = (
    *DENSE,
    *QKV_BIAS,
    *OUTPUT_BIAS,
    *QK_NORM,
    *GATED_DELTA,
    *DELTA_TOGETHER,
    *EXPERTS,
    *STACKED_EXPERTS,
    *SHARED_EXPERT,
    *MTP,
)
