"""GLM-5 (Z.ai): latent attention with an indexer, experts as DeepSeek-V3; some layers share an indexer from 5.2 on."""

from quire.models.deepseek_v3 import NAME_MAP as DENSE_MAP
from quire.models.names import INDEXER, NameMap

NAME_MAP: NameMap = (*DENSE_MAP, *INDEXER)
