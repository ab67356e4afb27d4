"""Compiles the sums of stored bytes for Hopper; prints the name of each kernel."""

import numpy as np
import torch

from quire.kernels.sums import triton

from .compiling import AbsentGpu, Made


def check(made: Made) -> None:
    """No register is spilled, and words are read whole where they can be."""
    assert made.stack == 0, made
    assert ("ld.global.b32" in made.ptx) == (made.constants["WIDTH"] == 4), made


def main() -> None:
    """Slices of rows and columns, of whole words and not."""
    AbsentGpu(check)
    rows = [np.array([0, 1 << 20, 0, 1, 2], np.int64), np.array([2, 6, 12, 1, 2], np.int64)]
    triton.add([(1 << 20, 1 << 20, rows[0]), (2, 12, rows[1])], torch.empty((2, 2), dtype=torch.int64, device="meta"))
