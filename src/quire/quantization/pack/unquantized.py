"""Unquantized weights in a kernel's layout, and how a linear kernel runs them."""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedLinear:
    """A weight in the kernel's own layout, which only the kernel understands, and the bias [N] or None."""

    weight: object
    bias: Tensor | None


def pack(kernel: ModuleType, tensors: dict[str, Tensor], device: torch.device) -> PackedLinear:
    """Reorder tensors["weight"] [N, K] for `kernel` (an implementation of `kernels/linear`), where it lies, and move
    the result to `device`; the loaded tensor is used up."""
    return _packed(kernel.pack(tensors["weight"]), tensors, device)


def pack_gated(kernel: ModuleType, tensors: dict[str, Tensor], device: torch.device) -> PackedLinear:
    """`pack` for `run_gated`, of a kernel with the feature "gated"."""
    return _packed(kernel.pack_gated(tensors["weight"]), tensors, device)


def _packed(weight: object, tensors: dict[str, Tensor], device: torch.device) -> PackedLinear:
    bias = tensors.get("bias")
    return PackedLinear(moved(weight, device), None if bias is None else bias.to(device))


def moved(packed: object, device: torch.device) -> object:
    """A packed weight on `device`: a tensor, or a tuple of tensors; other layouts are those of kernels of a CPU."""
    if isinstance(packed, tuple):
        return tuple(moved(part, device) for part in packed)
    return packed.to(device) if isinstance(packed, Tensor) and packed.device != device else packed


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
