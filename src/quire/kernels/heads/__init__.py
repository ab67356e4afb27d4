"""From the projected heads to what attention reads, in one operation.

prepare(qkv [T, Hq + 2 Hkv, D], norm [Hq + Hkv, D] or None, eps, cos [T, D], sin [T, D], kv, kv_slots [T] int64)
    -> q [T, Hq, D]
    q and k heads are normalized by their rows of `norm` (`quire.kernels.norm`; None: not at all), then rotated
    (`quire.kernels.rope`: sin is signed). k and v are written to `kv` (`quire.kernels.attention.KVView`) at slot =
    block * block_size + offset; block 0 takes padding.
    cos and sin have qkv's dtype. Hkv is that of `kv`. An implementation may keep float32 between the steps.
"""
