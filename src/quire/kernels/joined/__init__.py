"""Kernels that do the work of several operations in one launch, for steps of few rows on a GPU.

    decode_attention   `heads.prepare`, then `attention.paged_attention`

Layers use them where a step fits, and the implementation of attention has the feature "heads". The operations
themselves are the fallback and the specification.
"""
