"""Mistral 7B v0.2 and later (Mistral AI): no biases, full attention."""

from quire.layers.params import NameMap
from quire.models import names

NAME_MAP: NameMap = (
    *names.EMBEDDING_AND_HEAD,
    *names.BLOCK_NORMS,
    *names.ATTENTION,
    *names.GATED_MLP,
)
