"""Rotary embedding in three passes over x: multiply, swap halves, multiply and add."""

from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with its heads rotated by the angles of `cos` and signed `sin`. See `quire.kernels.rope`."""
    dtype = x.dtype
    swapped = x.roll(x.shape[-1] // 2, -1)
    return (x * cos.to(dtype)[:, None]).addcmul_(swapped, sin.to(dtype)[:, None])
