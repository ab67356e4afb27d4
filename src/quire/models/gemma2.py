"""Gemma 2 (Google): norms before and after each half of a layer, soft caps, windows in every second layer."""

from quire.models.names import ATTENTION, EMBEDDING_AND_HEAD, GATED_MLP, OUTPUT_BIAS, QKV_BIAS, SANDWICH_NORMS, NameMap

NAME_MAP: NameMap = (*EMBEDDING_AND_HEAD, *SANDWICH_NORMS, *ATTENTION, *QKV_BIAS, *OUTPUT_BIAS, *GATED_MLP)
