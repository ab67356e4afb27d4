"""GLM-4.5 (Zhipu): grouped-query attention with half of each head rotated, routed as DeepSeek-V3."""

from quire.models import names
from quire.models.names import NameMap

NAME_MAP: NameMap = (
    *names.EMBEDDING_AND_HEAD,
    *names.BLOCK_NORMS,
    *names.ATTENTION,
    *names.QKV_BIAS,
    *names.QK_NORM,
    *names.GATED_MLP,
    *names.EXPERTS,
    *names.ROUTER_BIAS,
    *names.SHARED_EXPERTS,
    *names.PREDICTION,
)
