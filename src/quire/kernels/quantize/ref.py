"""Quantization of activations as the rules read."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.scheme import GROUP, Wire
from quire.kernels.quantize.rows import QuantizedRows

SMALLEST = 1e-10
FP8_MAX, INT8_MAX = 448.0, 127.0


def fp8_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x to FP8 with a scale for each row; return values and scales. See `quire.kernels.quantize`."""
    scale = _scale(x.float(), FP8_MAX)
    return fp8_static(x, scale), scale


def fp8_groups(x: Tensor, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize x to FP8 with a scale for every 128 columns of a row; return values and scales.

    ue8m0   True: scales are rounded up to powers of two. See `quire.kernels.quantize`
    """
    groups = F.pad(x.float(), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    scale = _scale(groups, FP8_MAX)
    if ue8m0:
        part, power = scale.frexp()  # part in [0.5, 1)
        powers = torch.ldexp(torch.ones_like(scale), power - (part == 0.5).int())
        scale = powers.where(scale.isfinite(), scale)
    return fp8_static(groups, scale).flatten(1)[:, : x.shape[1]].contiguous(), scale.squeeze(2)


def fp8_static(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale quantized to FP8. See `quire.kernels.quantize`."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def int8_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x to INT8 with a scale for each row; return values and scales. See `quire.kernels.quantize`."""
    scale = _scale(x.float(), INT8_MAX)
    return int8_static(x, scale), scale


def int8_static(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale quantized to INT8. See `quire.kernels.quantize`."""
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8)


def quantize_rows(x: Tensor, wire: Wire) -> QuantizedRows:
    """Quantize x to the form of a wire. See `quire.kernels.quantize`."""
    if wire.group:
        values, scales = fp8_groups(x, wire.powers)
    else:
        values, scales = (int8_tokens if wire.values == "int8" else fp8_tokens)(x)
    return QuantizedRows(values, scales, x.dtype)


def _scale(x: Tensor, largest: float) -> Tensor:
    amax = x.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
    # Divided by a number, PyTorch on CUDA would multiply with the reciprocal; a copied number cannot be captured
    return amax / amax.new_full((), largest)
