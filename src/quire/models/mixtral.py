"""Mixtral (Mistral AI): experts in every feed-forward layer, under names of their own."""

from quire.models.names import ATTENTION, BLOCK_NORMS, EMBEDDING_AND_HEAD, MIXTRAL_EXPERTS, NameMap

NAME_MAP: NameMap = (*EMBEDDING_AND_HEAD, *BLOCK_NORMS, *ATTENTION, *MIXTRAL_EXPERTS)
