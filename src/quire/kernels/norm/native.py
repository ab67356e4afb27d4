"""RMS normalization in one pass per row; native.c has the C code."""

import torch
from torch import Tensor

from quire.kernels.native.library import loaded


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, over the last dimension. See `quire.kernels.norm`."""
    rows = x.flatten(0, -2)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype)
    if x.dtype not in (torch.float32, torch.bfloat16) or weight.dtype != x.dtype or not (x.is_cpu and weight.is_cpu):
        raise ValueError(
            f"native norm: x and the weight must both be float32 or both bfloat16, on the CPU; x is "
            f"{x.dtype} on {x.device}, the weight {weight.dtype} on {weight.device}"
        )
    if not weight.is_contiguous() or weight.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"native norm: the weight must be contiguous and as wide as x {tuple(x.shape)}; it is "
            f"{tuple(weight.shape)} with strides {weight.stride()}"
        )
    loaded().quire_rms_norm(
        rows.data_ptr(),
        weight.data_ptr(),
        y.data_ptr(),
        rows.shape[0],
        rows.shape[1],
        rows.stride(0),
        weight.numel() // rows.shape[1],
        eps,
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return y
