"""Bookkeeping of the KV cache: the blocks of each request, the free blocks, and the content of each block.

Knows block ids, token ids and hashes. Knows nothing of bytes, devices or layers (`kvstore/` moves the bytes), nor of
queues and priorities (`engine/`). Never imports torch.
"""
