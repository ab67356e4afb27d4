"""Plain weights: one matrix and perhaps a bias, stored as they are computed with.

A fused projection stacks the output rows of several checkpoint tensors (q, k, v); each one is a part.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedLinear:
    """What the kernel runs: its own layout of the weight, which only it understands, and the bias [N] or None."""

    weight: object
    bias: Tensor | None


def describe(parts: dict[str, int], in_features: int, bias: bool) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a projection whose parts have the given numbers of output rows."""
    rows = sum(parts.values())
    return {"weight": (rows, in_features), "bias": (rows,)} if bias else {"weight": (rows, in_features)}


def load(target: Tensor, source: Tensor, rows: tuple[int, int] | None) -> None:
    """Copy a checkpoint tensor into its rows of `target` (all of it when None), converting the dtype."""
    place = target if rows is None else target[rows[0] : rows[0] + rows[1]]
    place.copy_(source)


def pack(kernel: ModuleType, weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Reorder the weight for `kernel` (an implementation of `kernels/linear`); the plain one is no longer needed."""
    with torch.no_grad():
        return PackedLinear(kernel.pack(weight.detach()), None if bias is None else bias.detach())


def pack_gated(kernel: ModuleType, weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """`pack` for `run_gated`, of a kernel with the feature "gated"."""
    with torch.no_grad():
        return PackedLinear(kernel.pack_gated(weight.detach()), None if bias is None else bias.detach())


def run(kernel: ModuleType, x: Tensor, packed: PackedLinear) -> Tensor:
    """x [T, K] -> [T, N]."""
    y: Tensor = kernel.run(x, packed.weight, packed.bias)
    return y


def run_add(kernel: ModuleType, x: Tensor, packed: PackedLinear, residual: Tensor) -> Tensor:
    """x [T, K] -> residual [T, N] + the product, perhaps in the residual's memory, of a kernel with "add"."""
    y: Tensor = kernel.run_add(x, packed.weight, packed.bias, residual)
    return y


def run_norm(kernel: ModuleType, x: Tensor, norm: Tensor, eps: float, packed: PackedLinear) -> Tensor:
    """`run` of x after an RMS norm with the weight `norm` [K], of a kernel with the feature "norm"."""
    y: Tensor = kernel.run_norm(x, norm, eps, packed.weight, packed.bias)
    return y


def run_norm_gated(kernel: ModuleType, x: Tensor, norm: Tensor, eps: float, packed: PackedLinear) -> Tensor:
    """`run_gated` of x after an RMS norm with the weight `norm` [K], of a kernel with "norm" and "gated"."""
    y: Tensor = kernel.run_norm_gated(x, norm, eps, packed.weight, packed.bias)
    return y


def run_float(kernel: ModuleType, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
    """x [T, K] -> [T, N] float32; in `out` where that is given, to a kernel with the feature "out"."""
    given = () if out is None else (out,)
    y: Tensor = kernel.run_float(x, packed.weight, packed.bias, *given)
    return y


def run_gated(kernel: ModuleType, x: Tensor, packed: PackedLinear) -> Tensor:
    """x [T, K] -> silu(gate) * up [T, N / 2]."""
    y: Tensor = kernel.run_gated(x, packed.weight, packed.bias)
    return y


def rows(kernel: ModuleType, packed: PackedLinear, ids: Tensor) -> Tensor:
    """Rows `ids` [T] of the weight -> [T, K], of a kernel with the feature "rows"."""
    y: Tensor = kernel.rows(packed.weight, ids)
    return y
