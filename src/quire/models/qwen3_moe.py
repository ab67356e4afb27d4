"""Qwen3-MoE (Alibaba): Qwen3 with experts in the feed-forward layers, none of them shared."""

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
    *names.EXPERTS,
)
