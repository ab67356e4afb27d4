"""GLM-4.5 (Zhipu): grouped-query attention with half of each head rotated, routed as DeepSeek-V3."""

from quire.models.names import DENSE, EXPERTS, PREDICTION, QK_NORM, QKV_BIAS, ROUTER_CORRECTION, SHARED_EXPERTS, NameMap

NAME_MAP: NameMap = (*DENSE, *QKV_BIAS, *QK_NORM, *EXPERTS, *ROUTER_CORRECTION, *SHARED_EXPERTS, *PREDICTION)
