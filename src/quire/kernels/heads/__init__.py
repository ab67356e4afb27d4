"""Norm and rotary embedding of the projected heads, and the write of keys and values to the cache, in one operation.

prepare(qkv [T, Hq + 2 Hkv, D], norm [Hq + Hkv, D] or None, eps, cos [T, D], sin [T, D], kv, kv_slots [T] int64,
        values="") -> q [T, Hq, D]
    Normalizes q and k heads, each by its row of `norm` (`quire.kernels.norm`; None: no norm). Rotates them
    (`quire.kernels.rope`: sin is signed). Writes k and v to `kv` (`quire.kernels.attention.KVView`) at slot = block *
    block_size + offset; padding goes to block 0. Features: see `quire.kernels.attention`.
    values   "": v as it is; "normed": divided by its root mean square; "keys": qkv has no v, which is k divided by its
             root mean square, before the norm of k; "kept": qkv has queries alone, and nothing is written
    cos and sin have qkv's dtype. Hkv is that of `kv`. An implementation may keep float32 between norm and rotation.
"""

from __future__ import annotations

from torch import Tensor

VALUES = ("", "normed", "keys", "kept")


def num_heads(qkv: Tensor, kv_heads: int, values: str) -> tuple[int, int]:
    """Return the number of query heads, and of KV heads that are written, of qkv [T, heads, D] for `prepare`."""
    own = {"": 2, "normed": 2, "keys": 1, "kept": 0}[values]
    return qkv.shape[1] - own * kv_heads, kv_heads if own else 0
