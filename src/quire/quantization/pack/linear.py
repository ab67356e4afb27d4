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
    """Pack a linear layer's weight for `kernel`, an implementation of `kernels/linear`.

    tensors   "weight", a Tensor or QuantizedMatrix [N, K], and "bias" [N] if there is one. Do not use them afterwards
    device    device of the packed weight; packing runs on the device of the loaded weight
    """
    return _packed(kernel.pack(tensors["weight"]), tensors, device)


def pack_gated(kernel: ModuleType, tensors: dict[str, Any], device: torch.device) -> PackedLinear:
    """Pack the rows of gate, then those of up, as one weight for `run_gated`. See `pack`. Needs the feature "gated"."""
    return _packed(kernel.pack_gated(tensors["weight"]), tensors, device)


def _packed(weight: object, tensors: dict[str, Any], device: torch.device) -> PackedLinear:
    bias = tensors.get("bias")
    return PackedLinear(moved(weight, device), None if bias is None else bias.to(device))


def moved(packed: object, device: torch.device) -> object:
    """Return a packed weight with all its tensors on `device`, also those inside tuples and dataclasses."""
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
    """Return residual [T, N] + `run` of x. May overwrite the residual. The kernel needs the feature "add"."""
    y: Tensor = kernel.run_add(x, packed.weight, packed.bias, residual)
    return y


def run_norm(kernel: ModuleType, x: Tensor, norm: Tensor, eps: float, packed: PackedLinear) -> Tensor:
    """Return `run` of the RMS norm of x with the weight `norm` [K]. The kernel needs the feature "norm"."""
    y: Tensor = kernel.run_norm(x, norm, eps, packed.weight, packed.bias)
    return y


def run_norm_gated(kernel: ModuleType, x: Tensor, norm: Tensor, eps: float, packed: PackedLinear) -> Tensor:
    """Return `run_gated` of the RMS norm of x with the weight `norm` [K]. Needs the features "norm" and "gated"."""
    y: Tensor = kernel.run_norm_gated(x, norm, eps, packed.weight, packed.bias)
    return y


def run_float(kernel: ModuleType, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
    """Return `run` of x in float32, [T, N]. With `out`, write the result there: the kernel needs the feature "out"."""
    given = () if out is None else (out,)
    y: Tensor = kernel.run_float(x, packed.weight, packed.bias, *given)
    return y


def run_gated(kernel: ModuleType, x: Tensor, packed: PackedLinear) -> Tensor:
    """Return silu(gate) * up of x, [T, K] -> [T, N / 2], with a weight of `pack_gated`. Needs the feature "gated"."""
    y: Tensor = kernel.run_gated(x, packed.weight, packed.bias)
    return y


def rows(kernel: ModuleType, packed: PackedLinear, ids: Tensor) -> Tensor:
    """Return the rows `ids` [T] of the weight, [T, K]. The kernel needs the feature "rows"."""
    y: Tensor = kernel.rows(packed.weight, ids)
    return y
