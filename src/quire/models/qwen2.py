"""Qwen2 and Qwen2.5 (Alibaba): biases on q, k and v, none on the output."""

from quire.models import names
from quire.models.names import NameMap

NAME_MAP: NameMap = (
    *names.EMBEDDING_AND_HEAD,
    *names.BLOCK_NORMS,
    *names.ATTENTION,
    *names.QKV_BIAS,
    *names.GATED_MLP,
)
