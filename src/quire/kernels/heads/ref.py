"""Norm, rotation and cache write one after the other, by the reference of each."""

from torch import Tensor

from quire.kernels.attention import KVView
from quire.kernels.attention.ref import write_kv
from quire.kernels.heads import num_heads
from quire.kernels.norm.ref import rms_norm
from quire.kernels.rope.ref import apply_rope


def prepare(
    qkv: Tensor,
    norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv: KVView,
    kv_slots: Tensor,
    values: str = "",
) -> Tensor:
    """Normalize and rotate q and k, write k and v to the cache, and return q. See `quire.kernels.heads`."""
    heads, kv_heads = num_heads(qkv, kv.k.shape[1], values)
    qk = qkv[:, : heads + kv_heads]
    rotated = apply_rope(qk if norm is None else rms_norm(qk, norm, eps), cos, sin)
    if kv_heads:
        v = qkv[:, -kv_heads:]
        v = rms_norm(v, v.new_ones(v.shape[2]), eps) if values else v
        write_kv(rotated[:, heads:], v, kv, kv_slots)
    return rotated[:, :heads]
