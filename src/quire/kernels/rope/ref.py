"""Rotary embedding, as the formula reads, in float32."""

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with its heads rotated by the angles of `cos` and signed `sin`. See `quire.kernels.rope`."""
    first, second = x.float().chunk(2, dim=-1)
    cos_half = cos.float()[:, None, : first.shape[-1]]
    sin_half = sin.float()[:, None, first.shape[-1] :]
    rotated = torch.cat((first * cos_half - second * sin_half, second * cos_half + first * sin_half), dim=-1)
    return rotated.to(x.dtype)
