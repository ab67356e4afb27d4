"""Normalization, as the formulas read."""

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, factor: Tensor | None = None
) -> Tensor:
    """Return (residual + x / sqrt(mean(x^2) + eps) * weight) * factor, over the last dimension.

    See `quire.kernels.norm`.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    summed = normed if residual is None else residual.float() + normed
    return (summed if factor is None else summed * factor).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """Return the layer normalization of x over the last dimension, times weight. See `quire.kernels.norm`."""
    wide = x.float()
    normed = rms_norm(wide - wide.mean(-1, keepdim=True), weight, eps)
    return (normed if bias is None else normed + bias.float()).to(x.dtype)
