"""Normalization through PyTorch's fused CPU operators."""

import torch.nn.functional as F
from torch import Tensor

from quire.kernels.norm import ref


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, factor: Tensor | None = None
) -> Tensor:
    """Return (residual + x / sqrt(mean(x^2) + eps) * weight) * factor, over the last dimension.

    See `quire.kernels.norm`.
    """
    if weight.dtype != x.dtype or residual is not None or factor is not None:
        return ref.rms_norm(x, weight, eps, residual, factor)
    width = x.shape[-1:]
    if weight.dim() == 1:
        return F.rms_norm(x, width, weight, eps)
    return F.rms_norm(x, width, None, eps).mul_(weight)


def layer_norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """Return the layer normalization of x over the last dimension, times weight. See `quire.kernels.norm`."""
    added = None if bias is None else bias.float()
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), added, eps).to(x.dtype)
