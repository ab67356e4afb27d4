"""Rotary position embedding (Su et al., 2021) in the half-split ("NeoX") convention of Hugging Face.

apply_rope(x [T, H, D], cos [T, D], sin [T, D]) -> [T, H, D]
    Element d of the first half is paired with element d + D/2. A row of `cos` or `sin` holds D/2 numbers twice:
    y[:D/2] = x[:D/2] * cos - x[D/2:] * sin,  y[D/2:] = x[D/2:] * cos + x[:D/2] * sin.
    `sin` is SIGNED: its first half is already negated (see rotary.py), so y = x * cos + swap(x) * sin.
    cos and sin have x's dtype or float32. x may be a strided view; the result is contiguous.
"""
