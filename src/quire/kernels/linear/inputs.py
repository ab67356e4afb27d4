"""Inputs for tests and measurements of the linear kernels."""

import torch
from torch import Tensor

from quire.contracts.scheme import Scheme
from quire.kernels.pack.matrix import QuantizedMatrix, empty

SHAPES = ((1, 8, 8), (3, 40, 24), (8, 96, 256), (65, 129, 64), (33, 64, 320), (700, 48, 1056))  # (T, N, K)


def make(shape: tuple[int, int, int], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return random x [T, K], weight [N, K] and bias [N]; shape is (T, N, K)."""
    rows, out, inner = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inner, generator=generator).to(dtype)
    weight = torch.randn(out, inner, generator=generator).mul_(inner**-0.5).to(dtype)
    return x, weight, torch.randn(out, generator=generator).to(dtype)


def random_matrix(scheme: Scheme, n: int, k: int, device: torch.device) -> QuantizedMatrix:
    """Return a matrix of random bits whose product with normal inputs is about 1. No code of e4m3 is NaN."""
    matrix = empty(scheme, (n, k), device)
    bits = torch.randint(0, 256, matrix.values.shape, dtype=torch.uint8, device=device)
    typical = {"e4m3": 150, "int8": 74, "w4": 5, "w8": 74, "e2m1": 3}[scheme.values]
    if scheme.values == "e4m3":
        bits -= ((bits & 127) == 127).to(torch.uint8)
    matrix.values.copy_(bits.view(matrix.values.dtype))
    scale = torch.empty(matrix.scale.shape, device=device).uniform_(0.5, 1.5).div_(typical * k**0.5)
    matrix.scale.copy_(scale.log2().round().add(127) if scheme.values == "e2m1" else scale)
    if matrix.zero is not None:
        matrix.zero.random_(0, 16 if scheme.values == "w4" else 256)
    return matrix
