"""Inputs for tests and measurements of the rope kernels."""

import torch
from torch import Tensor

SHAPES = ((1, 1, 2), (5, 3, 16), (33, 24, 128))  # [T, H, D]


def make(shape: tuple[int, int, int], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return random x of `shape` (T, H, D), a strided view of a wider tensor, and cos and signed sin [T, D]."""
    tokens, heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads + 2, dim, generator=generator).to(dtype)[:, :heads]
    angles = torch.rand(tokens, dim // 2, generator=generator) * 6.28
    cos, sin = angles.cos(), angles.sin()
    return x, torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)
