"""Plain weights: one matrix and perhaps a bias, stored as they are computed with.

A fused projection stacks the output rows of several checkpoint tensors (q, k, v); each one is a part.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedLinear:
    """What `run` needs: the kernel's own layout of the weight, and the bias [N] or None."""

    weight: Tensor
    bias: Tensor | None


def describe(parts: dict[str, int], in_features: int, bias: bool) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a projection whose parts have the given numbers of output rows."""
    rows = sum(parts.values())
    return {"weight": (rows, in_features), "bias": (rows,)} if bias else {"weight": (rows, in_features)}


def rows_of(parts: dict[str, int]) -> dict[str, tuple[int, int]]:
    """(first row, number of rows) of every part in the stacked tensor."""
    placed, first = {}, 0
    for name, rows in parts.items():
        placed[name] = (first, rows)
        first += rows
    return placed


def load(target: Tensor, source: Tensor, rows: tuple[int, int] | None) -> None:
    """Copy a checkpoint tensor into its rows of `target` (all of it when None), converting the dtype."""
    place = target if rows is None else target[rows[0] : rows[0] + rows[1]]
    place.copy_(source)


def pack(kernel: ModuleType, weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Reorder the weight for `kernel` (an implementation of `kernels/linear`); the plain one is no longer needed."""
    with torch.no_grad():
        return PackedLinear(kernel.pack(weight.detach()), None if bias is None else bias.detach())


def run(kernel: ModuleType, x: Tensor, packed: PackedLinear) -> Tensor:
    """x [T, K] -> [T, N]."""
    y: Tensor = kernel.run(x, packed.weight, packed.bias)
    return y
