"""DeepSeek-V2 and V2-Lite: latent attention, softmax routing, shared experts, the first layers dense."""

from quire.models import names
from quire.models.names import NameMap

NAME_MAP: NameMap = (
    *names.EMBEDDING_AND_HEAD,
    *names.BLOCK_NORMS,
    *names.LATENT_ATTENTION,
    *names.DIRECT_QUERY,
    *names.COMPRESSED_QUERY,
    *names.GATED_MLP,
    *names.EXPERTS,
    *names.SHARED_EXPERTS,
)
