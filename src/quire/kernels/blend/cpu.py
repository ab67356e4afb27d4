"""Moves and deviations of cached keys and values in PyTorch, all tokens at once."""

from torch import Tensor

from quire.kernels.attention import KVView
from quire.kernels.attention.eight_bits import encode, gather
from quire.kernels.rope.cpu import apply_rope


def move(kv: KVView, sources: Tensor, targets: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Write the values and the rotated keys of `sources` to `targets`. See `quire.kernels.blend`."""
    keys = encode(apply_rope(_read(kv.k, sources).float(), cos, sin), 1.0, kv.k.dtype)
    _write(kv.k, targets, keys.to(kv.k.dtype))
    _write(kv.v, targets, _read(kv.v, sources))


def deviation(kv: KVView, sources: Tensor, targets: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the squared distance of each target from its moved source. See `quire.kernels.blend`."""
    keys = _read(kv.k, targets).float() - apply_rope(_read(kv.k, sources).float(), cos, sin)
    values = _read(kv.v, targets).float() - _read(kv.v, sources).float()
    return (keys * kv.k_scale).square_().sum((1, 2)) + (values * kv.v_scale).square_().sum((1, 2))


def _read(side: Tensor, slots: Tensor) -> Tensor:
    """Return the tokens in `slots` [N] of keys or values, [N, H, D]."""
    size = side.shape[2]
    return gather(side.transpose(1, 2), (slots // size, slots % size))


def _write(side: Tensor, slots: Tensor, tokens: Tensor) -> None:
    size = side.shape[2]
    side.transpose(1, 2).index_put_((slots // size, slots % size), tokens)
