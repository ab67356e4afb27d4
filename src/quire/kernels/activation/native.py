"""Activations in one pass; native.c has the C code."""

import torch
from torch import Tensor

from quire.kernels.activation import POINTWISE, number_of
from quire.kernels.native.library import loaded


def gated(gate_up: Tensor, act: str = "silu", up: Tensor | None = None) -> Tensor:
    """Return the activation [T, I] of gate and up, the halves of each row. See `quire.kernels.activation`."""
    if up is None:  # two views: a recording knows no operation with two results
        middle = -(-gate_up.shape[1] // 2)
        gate, up = gate_up[:, :middle], gate_up[:, middle:]
    else:
        gate = gate_up
    for side in (gate, up):
        if side.dtype not in (torch.float32, torch.bfloat16) or not side.is_cpu or side.stride(1) != 1:
            raise ValueError(
                f"native activation: gate and up must be float32 or bfloat16 on the CPU, with stride 1 inside "
                f"a row; one is {side.dtype} on {side.device} with strides {side.stride()}"
            )
    if gate.dtype != up.dtype or gate.shape != up.shape:
        raise ValueError(
            f"native activation: gate is {gate.dtype} {list(gate.shape)}, and up {up.dtype} {list(up.shape)}"
        )
    rows, width = gate.shape
    y = gate.new_empty(rows, width)
    loaded().quire_gated(
        gate.data_ptr(),
        up.data_ptr(),
        y.data_ptr(),
        rows,
        width,
        gate.stride(0),
        up.stride(0),
        number_of(act),
        gate.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return y


def pointwise(x: Tensor, act: str) -> Tensor:
    """Return the activation of each number of x, [T, I]. See `quire.kernels.activation`."""
    if x.dtype not in (torch.float32, torch.bfloat16) or not x.is_cpu or x.stride(1) != 1:
        raise ValueError(
            f"native activation: x must be float32 or bfloat16 on the CPU, with stride 1 inside a row; it is "
            f"{x.dtype} on {x.device} with strides {x.stride()}"
        )
    y = x.new_empty(x.shape)
    loaded().quire_pointwise(
        x.data_ptr(),
        y.data_ptr(),
        *x.shape,
        x.stride(0),
        number_of(act, POINTWISE),
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return y


def opened(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate), [T, N]. See `quire.kernels.activation`."""
    for name, one in (("x", x), ("gate", gate)):
        if one.dtype not in (torch.float32, torch.bfloat16) or not one.is_cpu or one.stride(1) != 1:
            raise ValueError(
                f"native activation: {name} must be float32 or bfloat16 on the CPU, with stride 1 inside a row; it is "
                f"{one.dtype} on {one.device} with strides {one.stride()}"
            )
    if x.dtype != gate.dtype or x.shape != gate.shape:
        raise ValueError(
            f"native activation: x and gate must be alike; they are {x.dtype} {tuple(x.shape)} and {gate.dtype} "
            f"{tuple(gate.shape)}"
        )
    y = x.new_empty(x.shape)
    loaded().quire_opened(
        x.data_ptr(),
        gate.data_ptr(),
        y.data_ptr(),
        *x.shape,
        x.stride(0),
        gate.stride(0),
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return y
