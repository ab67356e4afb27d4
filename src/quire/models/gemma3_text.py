"""Gemma 3 (Google), text: as Gemma 2, with norms of heads and five windows to a full layer."""

from quire.models.gemma2 import NAME_MAP as GEMMA2
from quire.models.names import QK_NORM, NameMap

NAME_MAP: NameMap = (*GEMMA2, *QK_NORM)
