"""Reuse of cached keys and values at other positions (CacheBlend: Yao et al., EuroSys 2025, arXiv 2405.16444).

A key in the cache is rotated to its position, and rotations add up: rotated by the difference of two positions, it is
the key of the new position. Values have no position. N tokens are moved; a slot is block * block_size + offset.

move(kv, sources [N] int64, targets [N] int64, cos [N, D], sin [N, D])
    Writes to each slot of `targets` the values and the rotated keys of the slot in `sources`. No slot of `targets` is
    in `sources`. cos and sin are float32, of the difference of positions, without the factor of YaRN, which the keys
    have already (`quire.kernels.rope`: sin is signed). Products are float32.
deviation(kv, sources, targets, cos, sin) -> [N] float32
    The squared distance between what `move` would write to each target and what is there: keys and values, all heads.

`kv` is a `KVView`. Its keys and values may have different head sizes: rotated keys and latents (`latent_sides`). An
8-bit cache holds codes (`quire.kernels.attention.eight_bits`); `move` rotates codes, because the scale does not change.
Features: see `quire.kernels.attention`.
"""

from __future__ import annotations

from quire.kernels.attention import KVView
from quire.kernels.latent import LatentView


def latent_sides(cache: LatentView) -> KVView:
    """Return a cache of latents as a `KVView`: its keys are the rotated keys, its values the latents."""
    return KVView(cache.rope, cache.latent, cache.scale, cache.scale)
