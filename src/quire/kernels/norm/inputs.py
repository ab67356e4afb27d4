"""Inputs for tests and measurements of the norm kernels."""

import torch
from torch import Tensor

SHAPES = ((1, 8), (3, 64), (7, 100), (64, 1024))  # [T, D]
HEAD_SHAPES = ((1, 3, 16), (5, 24, 64))  # [T, H, D]


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a random x of `shape`, and a weight over the last dimension of x; over the last two if x has three."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).mul_(3).to(dtype)
    weight = torch.rand(shape[1:], generator=generator).add_(0.5).to(dtype)
    return x, weight
