"""The bytes of the KV cache: where a page lies in memory.

Knows the geometry of a page and torch devices. Knows nothing of requests, keys or which block is whose (`kv/` decides
that), nor of how attention reads a page (`kernels/attention`).
"""
