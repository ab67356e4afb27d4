"""Mistral 7B v0.2 and later (Mistral AI): no biases, full attention."""

from quire.models import names
from quire.models.names import NameMap

NAME_MAP: NameMap = (
    *names.EMBEDDING_AND_HEAD,
    *names.BLOCK_NORMS,
    *names.ATTENTION,
    *names.GATED_MLP,
)
