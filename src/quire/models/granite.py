"""Granite 3 (IBM), dense: as Llama, with factors on embeddings, scores, residuals and logits."""

from quire.models.llama import NAME_MAP

__all__ = ["NAME_MAP"]
