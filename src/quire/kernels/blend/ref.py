"""Moves and deviations of cached keys and values, one token at a time, in float32."""

import torch
from torch import Tensor

from quire.kernels.attention import KVView
from quire.kernels.attention.eight_bits import encode
from quire.kernels.rope.ref import apply_rope


def move(kv: KVView, sources: Tensor, targets: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Write the values and the rotated keys of `sources` to `targets`. See `quire.kernels.blend`."""
    size = kv.block_size
    for i, (source, target) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
        old, new = (source // size, slice(None), source % size), (target // size, slice(None), target % size)
        turned = apply_rope(kv.k[old].float()[None], cos[i : i + 1], sin[i : i + 1])
        kv.k[new] = encode(turned[0], 1.0, kv.k.dtype).to(kv.k.dtype)
        kv.v[new] = kv.v[old]


def deviation(kv: KVView, sources: Tensor, targets: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the squared distance of each target from its moved source. See `quire.kernels.blend`."""
    size, found = kv.block_size, torch.empty(len(sources))
    for i, (source, target) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
        old, new = (source // size, slice(None), source % size), (target // size, slice(None), target % size)
        key = apply_rope(kv.k[old].float()[None], cos[i : i + 1], sin[i : i + 1])[0]
        keys, values = kv.k[new].float() - key, kv.v[new].float() - kv.v[old].float()
        found[i] = (keys * kv.k_scale).square().sum() + (values * kv.v_scale).square().sum()
    return found.to(sources.device)
