"""Qwen3-VL (Alibaba), its language model: as Qwen3. Rotation by sections is ordinary rotation for text."""

from quire.models.qwen3 import NAME_MAP

__all__ = ["NAME_MAP"]
