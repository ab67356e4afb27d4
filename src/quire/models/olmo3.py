"""OLMo-3 (Ai2): as OLMo-2, with three windows to a full layer."""

from quire.models.olmo2 import NAME_MAP

__all__ = ["NAME_MAP"]
