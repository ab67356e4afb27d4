"""Norm and rotary embedding of the projected heads, and the write of keys and values to the cache, in one operation.

prepare(qkv [T, Hq + 2 Hkv, D], norm [Hq + Hkv, D] or None, eps, cos [T, D], sin [T, D], kv, kv_slots [T] int64)
    -> q [T, Hq, D]
    Normalizes q and k heads, each by its row of `norm` (`quire.kernels.norm`; None: no norm). Rotates them
    (`quire.kernels.rope`: sin is signed). Writes k and v to `kv` (`quire.kernels.attention.KVView`) at slot = block *
    block_size + offset; padding goes to block 0. Features: see `quire.kernels.attention`.
    cos and sin have qkv's dtype. Hkv is that of `kv`. An implementation may keep float32 between norm and rotation.
"""
