"""The memory of the KV cache: the place of each page and of each layer in it.

Knows the geometry of a page and torch devices. Knows nothing of requests, keys or the owners of blocks (see `kv/`), nor
of the attention kernels that read a page (`kernels/attention`).
"""
