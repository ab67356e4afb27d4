"""Qwen3.5, 3.6 and 3.8 (Alibaba), the language model: gated delta nets in three of four layers, gated attention."""

from quire.models.names import DELTA_APART, DENSE, GATED_DELTA, MTP, OUTPUT_BIAS, QK_NORM, QKV_BIAS, NameMap

NAME_MAP: NameMap = (*DENSE, *QKV_BIAS, *OUTPUT_BIAS, *QK_NORM, *GATED_DELTA, *DELTA_APART, *MTP)
