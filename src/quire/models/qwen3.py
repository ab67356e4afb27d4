"""Qwen3 (Alibaba): q and k are normalized per head before rotation; biases only where the config asks."""

from quire.models import names
from quire.models.names import NameMap

NAME_MAP: NameMap = (
    *names.EMBEDDING_AND_HEAD,
    *names.BLOCK_NORMS,
    *names.ATTENTION,
    *names.QKV_BIAS,
    *names.OUTPUT_BIAS,
    *names.QK_NORM,
    *names.GATED_MLP,
)
