"""DeepSeek-V3.2: as V3, with an indexer that chooses the tokens that a token attends to."""

from quire.models.deepseek_v3 import NAME_MAP as DENSE_MAP
from quire.models.names import INDEXER, NameMap

NAME_MAP: NameMap = (*DENSE_MAP, *INDEXER)
