"""Bookkeeping of the KV cache: which blocks a request holds, which are free, which content is where.

Knows block ids, token ids and hashes. Knows nothing of bytes, devices or layers (`kvstore/` moves what this room
decides), nor of queues and priorities (`engine/`). Never imports torch.
"""
