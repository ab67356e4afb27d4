"""Norm, rotation and cache write one after the other, by the reference of each."""

import torch
from torch import Tensor

from quire.kernels.attention import KVView
from quire.kernels.attention.ref import write_kv
from quire.kernels.norm.ref import rms_norm
from quire.kernels.rope.ref import apply_rope


def prepare(
    qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, kv: KVView, kv_slots: Tensor
) -> Tensor:
    """Normalize and rotate q and k, write k and v to the cache, and return q. See `quire.kernels.heads`."""
    kv_heads = kv.k.shape[1]
    qk, v = torch.split(qkv, [qkv.shape[1] - kv_heads, kv_heads], dim=1)
    rotated = apply_rope(qk if norm is None else rms_norm(qk, norm, eps), cos, sin)
    q, k = torch.split(rotated, [rotated.shape[1] - kv_heads, kv_heads], dim=1)
    write_kv(k, v, kv, kv_slots)
    return q
