"""Quantization of weights to FP8 when they are loaded, by rounding to the nearest."""

import torch
from torch import Tensor

from quire.contracts.scheme import Scheme
from quire.quantization.pack.matrix import QuantizedMatrix, Room, empty, torch_room

SIDE, FP8_MAX, SMALLEST = 128, 448.0, 1e-10
NUMBERS = 1 << 20  # of the weight that are quantized at once


def quantized(weight: Tensor, scheme: Scheme, room: Room = torch_room) -> QuantizedMatrix:
    """Quantize a weight [N, K] to blocks of 128 x 128, whose sides must divide it, or to channels.

    The scale of a block is max(amax, 1e-10) / 448 in float32.
    """
    made = empty(scheme, (weight.shape[0], weight.shape[1]), weight.device, room)
    high, wide = scheme.block
    step = max(NUMBERS // max(weight.shape[1], 1) // high, 1) * high
    for i in range(0, len(weight), step):
        part = weight[i : i + step].float()
        blocks = part.view(-1, high, *((part.shape[1] // wide, wide) if wide else (1, part.shape[1])))
        scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=SMALLEST) / FP8_MAX
        made.values[i : i + step] = (blocks / scale).clamp(-FP8_MAX, FP8_MAX).view(part.shape).to(torch.float8_e4m3fn)
        made.scale[i // high : i // high + len(blocks)] = scale.squeeze(3).squeeze(1)
    return made
