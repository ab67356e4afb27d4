"""Kimi K2 (Moonshot AI): as DeepSeek-V3."""

from quire.models.deepseek_v3 import NAME_MAP

__all__ = ["NAME_MAP"]
