"""DeepSeek-V3 and R1: as V2, routed by sigmoid scores with a bias that balances the experts."""

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
    *names.ROUTER_BIAS,
    *names.SHARED_EXPERTS,
    *names.PREDICTION,
)
