"""Random quantized matrices of every kind, and their product in float64 on the same quantized activations."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.scheme import Scheme
from quire.kernels.pack.matrix import QuantizedMatrix

SCHEMES = {
    "fp8 blocks": Scheme(values="e4m3", block=(128, 128), inputs="group"),
    "fp8 blocks of a row": Scheme(values="e4m3", block=(1, 128), inputs="group"),
    "fp8 blocks ue8m0": Scheme(values="e4m3", block=(128, 128), inputs="group", ue8m0=True),
    "fp8 channels": Scheme(values="e4m3", block=(1, 0), inputs="token"),
    "fp8 static": Scheme(values="e4m3", block=(1, 0), inputs="tensor"),
    "int8": Scheme(values="int8", block=(1, 0), inputs="token"),
    "int8 static": Scheme(values="int8", block=(1, 0), inputs="tensor"),
    "w4 groups": Scheme(values="w4", block=(1, 32)),
    "w4 zeros order": Scheme(values="w4", block=(1, 32), zeros=True, order=True),
    "w4 channels": Scheme(values="w4", block=(1, 0)),
    "w8 groups": Scheme(values="w8", block=(1, 32), zeros=True),
    "w8 channels": Scheme(values="w8", block=(1, 0), order=True),
    "mxfp4": Scheme(values="e2m1", block=(1, 32)),
    "nvfp4": Scheme(values="e2m1", block=(1, 16), factor=True),
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7


@dataclass(frozen=True)
class Inputs:
    """Activations x [M, K]: rows of zeros, and columns 100 times as large as the others."""

    x: Tensor
    matrix: QuantizedMatrix
    bias: Tensor


def make(scheme: Scheme, rows: int, outputs: int, inputs: int, seed: int = 0) -> Inputs:
    """A matrix [outputs, inputs] of random bits and positive scales, and activations for it."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=random)
    x[:, torch.randperm(inputs, generator=random)[:3]] *= 100
    if rows > 1:
        x[rows // 2] = 0
    values = torch.randint(0, 256, (outputs, inputs * scheme.bits // 8), generator=random, dtype=torch.uint8)
    if scheme.values == "e4m3":
        values[(values & 127) == 127] = 8
        values = values.view(torch.float8_e4m3fn)
    if scheme.values == "int8":
        values = values.view(torch.int8)
    shape = scheme.scales(outputs, inputs)
    scale = torch.rand(shape, generator=random).add_(0.5).mul_(1e-3)
    factor = None
    if scheme.kind == "mxfp4":
        scale = torch.randint(113, 122, shape, generator=random, dtype=torch.uint8)
    elif scheme.factor:  # every code of a scale but NaN, also 0 and those below the normal numbers
        scale = torch.randint(0, 127, shape, generator=random, dtype=torch.uint8).view(torch.float8_e4m3fn)
        factor = torch.rand(outputs, 1, generator=random).add_(0.5).mul_(1e-5)
    zero = torch.randint(0, 1 << scheme.bits, shape, generator=random, dtype=torch.uint8) if scheme.zeros else None
    order = torch.randperm(inputs, generator=random).int() if scheme.order else None
    static = x.abs().amax() / 200 if scheme.inputs == "tensor" else None  # some values are clamped
    matrix = QuantizedMatrix(scheme, values, scale, zero, order, static, factor).check()
    return Inputs(x, matrix, torch.randn(outputs, generator=random))


def numbers(matrix: QuantizedMatrix) -> Tensor:
    """The weight by its formula, number by number, [N, K] float64."""
    scheme, (rows, columns) = matrix.scheme, matrix.shape
    middle = {"w4": 8, "w8": 128}.get(scheme.values, 0)
    stored = matrix.values.tolist() if scheme.bits == 4 else matrix.values.float().tolist()
    powers = scheme.kind == "mxfp4"
    factors = [1.0] * rows if matrix.factor is None else matrix.factor.flatten().tolist()
    scale = (matrix.scale if powers else matrix.scale.float()).tolist()
    zero = None if matrix.zero is None else matrix.zero.tolist()
    out: list[list[float]] = []
    high, wide = matrix.scheme.block
    for n in range(rows):
        out.append([])
        for k in range(columns):
            i, j = n // high, k // wide if wide else 0
            value = stored[n][k // 2] >> 4 * (k % 2) & 15 if scheme.bits == 4 else stored[n][k]
            if powers:
                out[n].append((-1) ** (value // 8) * E2M1[value % 8] * 2.0 ** (scale[i][j] - 127))
                continue
            if scheme.factor:
                out[n].append((-1) ** (value // 8) * E2M1[value % 8] * scale[i][j] * factors[n])
                continue
            out[n].append((value - (middle if zero is None else zero[i][j])) * scale[i][j])
    return torch.tensor(out, dtype=torch.float64)


def rounded(x: Tensor, matrix: QuantizedMatrix) -> Tensor:
    """The activations that the product reads, in float64, by the rules and row by row."""
    scheme, out = matrix.scheme, x.double().clone()
    if not scheme.inputs:
        return out
    wide = 128 if scheme.inputs == "group" else x.shape[1]
    most = 127.0 if scheme.values == "int8" else 448.0
    for row in range(len(x)):
        for start in range(0, x.shape[1], wide):
            part = x[row, start : start + wide].float()
            scale = matrix.input_scale if matrix.input_scale is not None else part.abs().max().clamp(min=1e-10) / most
            if scheme.ue8m0:
                scale = torch.tensor(2.0) ** torch.ceil(torch.log2(scale.double())).float()
            if scheme.values == "int8":
                kept = (part / scale).round().clamp(-128, 127)
            else:
                kept = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            out[row, start : start + wide] = kept.double() * scale.double()
    return out


def product(inputs: Inputs, weight: Tensor | None = None) -> Tensor:
    """x @ W.T + bias in float64, on the quantized activations. weight: `numbers` of the matrix, if they are known."""
    x = rounded(inputs.x, inputs.matrix)
    if inputs.matrix.order is not None:
        x = x[:, inputs.matrix.order.long()]
    return x @ (numbers(inputs.matrix) if weight is None else weight).t() + inputs.bias.double()
