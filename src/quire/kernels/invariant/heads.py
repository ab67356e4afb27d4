"""Norm, rotation and cache write: `quire.kernels.heads.triton` with as many heads in a program in every step.

A program of another size would divide the sum of a head's squares among its threads in another way.
"""

from torch import Tensor

from quire.kernels.attention import KVView
from quire.kernels.heads.triton import launch, row_block


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
    block = 1 << (qkv.shape[2] // 2 - 1).bit_length()
    return launch((qkv, norm, eps, cos, sin), kv, kv_slots, values, row_block(1, block))
