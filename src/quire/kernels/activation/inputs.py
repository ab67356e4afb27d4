"""Inputs for tests and measurements of the activation kernels."""

import torch
from torch import Tensor

SHAPES = ((1, 2), (3, 100), (17, 512))  # [T, 2I]


def make(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return a random tensor gate_up of `shape` (T, 2I)."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(4).to(dtype)
