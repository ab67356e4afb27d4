"""EXAONE-4 (LG): norms of the results of both halves and of heads; full layers beside windows have no rotation."""

from quire.models.names import AFTER_NORMS, ATTENTION, EMBEDDING_AND_HEAD, GATED_MLP, QK_NORM, NameMap

NAME_MAP: NameMap = (*EMBEDDING_AND_HEAD, *AFTER_NORMS, *ATTENTION, *QK_NORM, *GATED_MLP)
