"""Normalization in one pass per row; native.c has the C code."""

import torch
from torch import Tensor

from quire.kernels.native.library import loaded

TYPES = (torch.float32, torch.bfloat16)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, factor: Tensor | None = None
) -> Tensor:
    """Return (residual + x / sqrt(mean(x^2) + eps) * weight) * factor, over the last dimension.

    See `quire.kernels.norm`.
    """
    return _norm(x, weight, eps, residual, factor, centered=False)


def layer_norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """Return the layer normalization of x over the last dimension, times weight. See `quire.kernels.norm`."""
    return _norm(x, weight, eps, None, None, bias, centered=True)


def _norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    factor: Tensor | None,
    bias: Tensor | None = None,
    *,
    centered: bool,
) -> Tensor:
    rows = x.flatten(0, -2)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype)
    fits = weight.dtype in (x.dtype, torch.float32)
    if x.dtype not in TYPES or not fits or not (x.is_cpu and weight.is_cpu):
        raise ValueError(
            f"native norm: x must be float32 or bfloat16, the weight of x's dtype or float32, both on the CPU; x is "
            f"{x.dtype} on {x.device}, the weight {weight.dtype} on {weight.device}"
        )
    if not weight.is_contiguous() or weight.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"native norm: the weight must be contiguous and as wide as x {tuple(x.shape)}; it is "
            f"{tuple(weight.shape)} with strides {weight.stride()}"
        )
    if residual is not None:
        if residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_cpu:
            raise ValueError(
                f"native norm: the residual must be {x.dtype} {tuple(x.shape)} on the CPU; it is {residual.dtype} "
                f"{tuple(residual.shape)} on {residual.device}"
            )
        residual = residual.contiguous()
    if bias is not None and (bias.dtype != weight.dtype or bias.shape != weight.shape or not bias.is_contiguous()):
        raise ValueError(
            f"native norm: the bias must be like the weight, {weight.dtype} {tuple(weight.shape)}, and contiguous; it "
            f"is {bias.dtype} {tuple(bias.shape)}"
        )
    if factor is not None and (factor.dtype != torch.float32 or factor.numel() != 1 or not factor.is_cpu):
        raise ValueError(
            f"native norm: the factor must be a float32 on the CPU; it is {factor.dtype} {tuple(factor.shape)} on "
            f"{factor.device}"
        )
    loaded().quire_norm(
        rows.data_ptr(),
        weight.data_ptr(),
        None if residual is None else residual.data_ptr(),
        None if factor is None else factor.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        rows.shape[0],
        rows.shape[1],
        rows.stride(0),
        weight.numel() // rows.shape[1],
        eps,
        x.dtype == torch.bfloat16,
        weight.dtype == torch.bfloat16,
        int(centered),
        torch.get_num_threads(),
    )
    return y
