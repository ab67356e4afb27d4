"""OLMo-2 (Ai2): norms of the results of both halves, and of all query heads and all key heads together."""

from quire.models.names import (
    AFTER_NORMS,
    ATTENTION,
    EMBEDDING_AND_HEAD,
    GATED_MLP,
    OUTPUT_BIAS,
    QKV_BIAS,
    WIDE_NORM,
    NameMap,
)

NAME_MAP: NameMap = (
    *EMBEDDING_AND_HEAD,
    *AFTER_NORMS,
    *ATTENTION,
    *QKV_BIAS,
    *OUTPUT_BIAS,
    *WIDE_NORM,
    *GATED_MLP,
)
