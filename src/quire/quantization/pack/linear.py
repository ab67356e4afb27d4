"""Weights in the layout of a linear kernel, quantized or not, and how the kernel runs them."""

from dataclasses import dataclass, fields, is_dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedLinear:
    """A weight in the kernel's own layout, which only the kernel understands, and the bias [N] or None."""

    weight: object
    bias: Tensor | None


def pack(kernel: ModuleType, tensors: dict[str, Any], device: torch.device) -> PackedLinear:
    """Pack tensors["weight"], a Tensor or QuantizedMatrix [N, K], for an implementation of `kernels/linear`.

    tensors   "weight", and "bias" [N] if there is one;  device  of the packed weight
    Packing runs on the device of the loaded tensor, which must not be used afterwards.
    """
    return _packed(kernel.pack(tensors["weight"]), tensors, device)


def pack_gated(kernel: ModuleType, tensors: dict[str, Any], device: torch.device) -> PackedLinear:
    """Pack like `pack`, for `run_gated`; the kernel must have the feature "gated"."""
    return _packed(kernel.pack_gated(tensors["weight"]), tensors, device)


def _packed(weight: object, tensors: dict[str, Any], device: torch.device) -> PackedLinear:
    bias = tensors.get("bias")
    return PackedLinear(moved(weight, device), None if bias is None else bias.to(device))


def moved(packed: object, device: torch.device) -> object:
    """Return a packed weight on `device`. Tensors move, also those inside tuples and dataclasses; other values stay."""
    if isinstance(packed, tuple):
        return tuple(moved(part, device) for part in packed)
    if is_dataclass(packed) and not isinstance(packed, type):
        own = {field.name: getattr(packed, field.name) for field in fields(packed) if field.init}
        parts = {name: moved(part, device) for name, part in own.items()}
        return packed if all(part is own[name] for name, part in parts.items()) else replace(packed, **parts)
    return packed.to(device) if isinstance(packed, Tensor) and packed.device != device else packed


def run(kernel: ModuleType, x: Tensor, packed: PackedLinear) -> Tensor:
    """Return x @ weight.T + bias, [T, K] -> [T, N]."""
    y: Tensor = kernel.run(x, packed.weight, packed.bias)
    return y


def run_add(kernel: ModuleType, x: Tensor, packed: PackedLinear, residual: Tensor) -> Tensor:
    """Return residual [T, N] + `run` of x, perhaps in the residual's memory; needs a kernel with the feature "add"."""
    y: Tensor = kernel.run_add(x, packed.weight, packed.bias, residual)
    return y


def run_norm(kernel: ModuleType, x: Tensor, norm: Tensor, eps: float, packed: PackedLinear) -> Tensor:
    """Return `run` of x after an RMS norm with the weight `norm` [K]; needs a kernel with the feature "norm"."""
    y: Tensor = kernel.run_norm(x, norm, eps, packed.weight, packed.bias)
    return y


def run_norm_gated(kernel: ModuleType, x: Tensor, norm: Tensor, eps: float, packed: PackedLinear) -> Tensor:
    """Return `run_gated` of x after an RMS norm with the weight `norm` [K]; needs the features "norm" and "gated"."""
    y: Tensor = kernel.run_norm_gated(x, norm, eps, packed.weight, packed.bias)
    return y


def run_float(kernel: ModuleType, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
    """Return `run` of x in float32, [T, N]. A kernel with the feature "out" writes it to `out`."""
    given = () if out is None else (out,)
    y: Tensor = kernel.run_float(x, packed.weight, packed.bias, *given)
    return y


def run_gated(kernel: ModuleType, x: Tensor, packed: PackedLinear) -> Tensor:
    """Return silu(gate) * up, [T, K] -> [T, N / 2], for a weight of gate and up rows; needs the feature "gated"."""
    y: Tensor = kernel.run_gated(x, packed.weight, packed.bias)
    return y


def rows(kernel: ModuleType, packed: PackedLinear, ids: Tensor) -> Tensor:
    """Return the rows `ids` [T] of the weight, [T, K]; needs the feature "rows"."""
    y: Tensor = kernel.rows(packed.weight, ids)
    return y
