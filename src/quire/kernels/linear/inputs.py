"""Inputs for tests and measurements of the linear kernels."""

import torch
from torch import Tensor

SHAPES = ((1, 8, 8), (3, 40, 24), (8, 96, 256), (65, 129, 64), (33, 64, 320), (700, 48, 1056))  # (T, N, K)


def make(shape: tuple[int, int, int], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return random x [T, K], weight [N, K] and bias [N]; shape is (T, N, K)."""
    rows, out, inner = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inner, generator=generator).to(dtype)
    weight = torch.randn(out, inner, generator=generator).mul_(inner**-0.5).to(dtype)
    return x, weight, torch.randn(out, generator=generator).to(dtype)
