"""SmolLM3 (Hugging Face): as Llama; every fourth layer has no rotation."""

from quire.models.llama import NAME_MAP

__all__ = ["NAME_MAP"]
