"""Quantization of weights by rounding to the nearest: to FP8 while they are loaded, and for `quire quantize`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.scheme import Scheme
from quire.kernels.pack.matrix import MIDDLE, NO_POWER, QuantizedMatrix, Room, dequantize, empty, torch_room
from quire.kernels.pack.words import join_nibbles

FP8_MAX, SMALLEST = 448.0, 1e-10
E2M1_MAX, LEAST_E4M3 = 6.0, 2.0**-9
# Largest magnitude of a symmetric value. Unsigned integers reach one more below zero than above: a scale between both
# halves the largest error of the positive side.
MOST = {"e4m3": FP8_MAX, "int8": 127.0, "w4": 7.5, "w8": 127.5}
# Magnitudes halfway between those of E2M1: a number at one takes the code that is even.
HALFWAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
ROWS = 1024  # of a matrix that are compared at once; a multiple of 128
NUMBERS = 1 << 20  # of the weight that are quantized at once


def quantized(
    weight: Tensor, scheme: Scheme, room: Room = torch_room, scales: torch.dtype = torch.float32, most: float = 0.0
) -> QuantizedMatrix:
    """Return a weight [N, K] quantized by rounding to nearest: values, scales and zero points.

    Blocks at the edges may be smaller; groups must divide K.
    The scale of FP8 is max(amax, 1e-10) / 448, that of int8 max(amax, 1e-10) / 127. The scale of MXFP4 is the smallest
    power of two with amax < 7 * scale, so that amax is rounded to at most 6; of numbers that are not finite it is NaN.
    The factor of NVFP4 is 1 / (448 * 6 / most), rounded twice to float32, and the scale amax / 6 / factor in E4M3.
    A zero point is the value that means 0.
    room     function that allocates the values
    scales   dtype in which a checkpoint stores the scales; they are rounded to it before the values are computed
    most     of NVFP4: the largest magnitude of all matrices that share the factor
    """
    rows, columns = weight.shape
    made = empty(scheme, (rows, columns), weight.device, room)
    high, wide = scheme.block[0], scheme.block[1] or columns
    factor = 1 / (FP8_MAX * E2M1_MAX / torch.tensor(most, device=weight.device).clamp(min=SMALLEST))
    if made.factor is not None:
        made.factor.copy_(factor)
    step = max(NUMBERS // max(columns, 1) // high, 1) * high
    for i in range(0, rows, step):
        part = weight[i : i + step].float()
        padded = F.pad(part, (0, -columns % wide, 0, -len(part) % high))
        blocks = padded.view(-1, high, padded.shape[1] // wide, wide)
        if scheme.kind == "nvfp4":
            scale, zero = _fractions(blocks, factor), None
            values = _codes(blocks / (scale.float() * factor))
        elif scheme.kind == "mxfp4":
            scale, zero = _powers(blocks), None
            values = _codes(blocks / scale.view(torch.float8_e8m0fnu).float())
        else:
            scale, zero = _scales(blocks, scheme, scales)
            values = _values(blocks / scale, zero, scheme)
        values = values.view(padded.shape)[: len(part), :columns]
        made.values[i : i + step] = join_nibbles(values) if scheme.bits == 4 else values
        at = slice(i // high, i // high + len(blocks))
        made.scale[at] = scale.squeeze(3).squeeze(1)
        if made.zero is not None and zero is not None:
            made.zero[at] = zero.squeeze(3).squeeze(1).to(torch.uint8)
    return made


def relative_error(weight: Tensor, matrix: QuantizedMatrix) -> float:
    """Return the norm of the change over the norm of the weight [N, K]; 0 for a weight of zeros."""
    changed = whole = 0.0
    for i in range(0, len(weight), ROWS):
        part = weight[i : i + ROWS].float()
        changed += float((dequantize(matrix, i, i + ROWS) - part).square().sum(dtype=torch.float64))
        whole += float(part.square().sum(dtype=torch.float64))
    return (changed / whole) ** 0.5 if whole else 0.0


def _scales(blocks: Tensor, scheme: Scheme, scales: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the scale and the zero point of each block, [rows, 1, columns, 1] float32."""
    least = torch.finfo(scales).smallest_normal * torch.finfo(scales).eps  # above 0 after rounding
    if not scheme.zeros:
        scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=SMALLEST) / MOST[scheme.values]
        return scale.clamp(min=least).to(scales).float(), None
    top = (1 << scheme.bits) - 1
    low, high = blocks.amin((1, 3), keepdim=True).clamp(max=0), blocks.amax((1, 3), keepdim=True).clamp(min=0)
    scale = ((high - low).clamp(min=SMALLEST) / top).clamp(min=least).to(scales).float()
    return scale, (-low / scale).round().clamp(0, top)


def largest(weight: Tensor) -> float:
    """Return the largest magnitude of a weight, 0 of none; NaN if it has one."""
    return float(torch.stack(weight.aminmax()).abs().amax()) if weight.numel() else 0.0


def _fractions(blocks: Tensor, factor: Tensor) -> Tensor:
    """Return the scale of each block in units of `factor`, [rows, 1, columns, 1] float8_e4m3fn, above 0."""
    scale = blocks.abs().amax((1, 3), keepdim=True) / E2M1_MAX / factor
    return scale.clamp(LEAST_E4M3, FP8_MAX).to(torch.float8_e4m3fn)


def _powers(blocks: Tensor) -> Tensor:
    """Return the scale of each block as an exponent of E8M0, [rows, 1, columns, 1] uint8."""
    most = blocks.abs().amax((1, 3), keepdim=True)
    part, power = torch.frexp(most)  # part in [0.5, 1), or 0
    exponent = power - 3 + (part >= 7 / 8) + 127  # 4 <= most / scale < 7, or 3.5 <= most / scale < 4
    return torch.where(most.isfinite(), exponent.clamp(0, NO_POWER - 1), NO_POWER).to(torch.uint8)


def _codes(scaled: Tensor) -> Tensor:
    """Return the codes of E2M1 that are nearest to scaled numbers, one to a byte."""
    size = scaled.abs()
    code = torch.zeros_like(scaled, dtype=torch.uint8)
    for i, middle in enumerate(HALFWAY):
        code += size >= middle if i % 2 else size > middle
    return code + scaled.signbit().to(torch.uint8) * 8


def _values(scaled: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    """Return the values of scaled numbers in the type of `QuantizedMatrix`; 4-bit values one to a byte."""
    if scheme.values == "e4m3":
        return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    if scheme.values == "int8":
        return scaled.round().clamp(-128, 127).to(torch.int8)
    middle = MIDDLE[scheme.values] if zero is None else zero
    return (scaled.round() + middle).clamp(0, (1 << scheme.bits) - 1).to(torch.uint8)
