"""Llama 2 and 3 (Meta): biases only where the config asks, rope scaling "llama3" from 3.1 on."""

from quire.models import names
from quire.models.names import NameMap

NAME_MAP: NameMap = (
    *names.EMBEDDING_AND_HEAD,
    *names.BLOCK_NORMS,
    *names.ATTENTION,
    *names.QKV_BIAS,
    *names.OUTPUT_BIAS,
    *names.GATED_MLP,
    *names.MLP_BIAS,
)
