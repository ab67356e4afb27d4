"""Seed-OSS (ByteDance): as Llama, with biases on q, k and v unless the config says otherwise."""

from quire.models.llama import NAME_MAP

__all__ = ["NAME_MAP"]
