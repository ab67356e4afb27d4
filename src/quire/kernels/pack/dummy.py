"""Made-up quantized weights, as a checkpoint would store them, and as kernels take them: random bits, positive scales.

Operands of zeros or of one value make a device faster than it is.
"""

import torch
from torch import Tensor

from quire.contracts.params import Param
from quire.contracts.scheme import Scheme
from quire.kernels.pack.matrix import MIDDLE, QuantizedMatrix, empty
from quire.quantization.kfirst import GPTQ, GPTQ_V2
from quire.quantization.microscaled import NV_PACKED

LARGEST = {"e4m3": 448.0, "int8": 127.0, "w4": 8.0, "w8": 128.0, "e2m1": 6.0}  # of the values, counted from their zero
NAN = 127  # of float8_e4m3fn, without the sign
POWERS = (118, 125)  # first and end of E8M0 scales: 2^-9 to 2^-3, as in published checkpoints
FRACTIONS = (0x58, 0x60)  # first and end of scales in e4m3: 16 to 30
MOST_FRACTION = 30.0
INPUT_SCALE = 1 / 64  # of activations of a few units


class DummyTensors:
    """Fills the stored tensors of quantized parameters with random numbers.

    spread   largest magnitude of the dequantized weights; those of MXFP4 have the scales `POWERS`
    seed     seed of the random numbers
    tile     how many random numbers are drawn; each tensor on `device` is filled with repeated copies of them
    """

    def __init__(self, spread: float, seed: int, tile: int, device: torch.device) -> None:
        self._random, self._spread = torch.Generator().manual_seed(seed), spread
        bits = torch.randint(0, 256, (tile,), dtype=torch.uint8, generator=self._random)
        self._bits = {True: torch.where((bits & NAN) == NAN, bits ^ 1, bits).to(device), False: bits.to(device)}
        self._powers = torch.randint(*POWERS, (tile,), dtype=torch.uint8, generator=self._random).to(device)
        self._parts = torch.empty(tile).uniform_(0.5, 1.0, generator=self._random).to(device)
        self._fractions = torch.randint(*FRACTIONS, (tile,), dtype=torch.uint8, generator=self._random).to(device)

    def fill(self, param: Param, role: str, out: Tensor) -> None:
        """Fill `out`, a stored tensor of `param`. role: the last word of its name ("values", "scale", "zero", ...)."""
        stored = param.stored
        assert stored is not None
        if role == "values" or (role == "zero" and stored.zeros):
            repeat(self._bits[stored.values == "e4m3"], out.view(torch.uint8).view(-1))
        elif role == "zero":
            out.view(torch.uint8).fill_(_middle(param, stored))
        elif role == "scale" and stored.values == "e2m1":
            repeat(self._fractions if stored.factor else self._powers, out.view(torch.uint8).view(-1))
        elif role == "factor":
            size = self._spread / LARGEST[stored.values] / MOST_FRACTION
            out.fill_(1 / size if param.format == NV_PACKED.name else size)
        elif role == "scale":
            repeat(self._parts, out.view(-1))
            out *= self._spread / LARGEST[stored.values]
        elif role == "order":
            groups = torch.arange(len(out)) // stored.block[1]
            same = torch.Generator().manual_seed(len(out))  # fused matrices have one order
            out.copy_(groups[torch.randperm(len(out), generator=same)])
        else:
            assert role == "input_scale", role
            out.fill_(INPUT_SCALE)


def _middle(param: Param, stored: Scheme) -> int:
    """Return a byte of zero points of GPTQ that all mean the middle."""
    assert param.format in (GPTQ.name, GPTQ_V2.name)
    one = MIDDLE[stored.values] - (param.format == GPTQ.name)
    return one | one << 4 if stored.bits == 4 else one


def repeat(tile: Tensor, out: Tensor) -> None:
    """Fill the flat `out` with copies of `tile`, the last copy cut to fit. Launches at most two kernels."""
    size = len(tile)
    whole = out.numel() // size * size
    if whole:
        out[:whole].view(-1, size).copy_(tile)
    if rest := out.numel() - whole:
        out[whole:].copy_(tile[:rest])


def random_matrix(scheme: Scheme, n: int, k: int, device: torch.device) -> QuantizedMatrix:
    """Return a matrix of random bits whose product with normal inputs is about 1. No code of e4m3 is NaN."""
    matrix = empty(scheme, (n, k), device)
    bits = torch.randint(0, 256, matrix.values.shape, dtype=torch.uint8, device=device)
    typical = {"e4m3": 150, "int8": 74, "w4": 5, "w8": 74, "e2m1": 3}[scheme.values]
    if scheme.values == "e4m3":
        bits -= ((bits & 127) == 127).to(torch.uint8)
    matrix.values.copy_(bits.view(matrix.values.dtype))
    scale = torch.empty(matrix.scale.shape, device=device).uniform_(0.5, 1.5).div_(typical * k**0.5)
    if matrix.factor is not None:
        matrix.factor.uniform_(0.5, 1.5).div_(2048)
        scale *= 2048
    matrix.scale.copy_(scale.log2().round().add(127) if scheme.kind == "mxfp4" else scale)
    if matrix.zero is not None:
        matrix.zero.random_(0, 16 if scheme.values == "w4" else 256)
    return matrix
