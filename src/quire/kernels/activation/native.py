"""Gated activations in one pass; native.c has the C code."""

import torch
from torch import Tensor

from quire.kernels.activation import number_of
from quire.kernels.native.library import loaded


def gated(gate_up: Tensor, act: str = "silu") -> Tensor:
    """Return the activation [T, I] of gate and up, the halves of each row. See `quire.kernels.activation`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.dtype not in (torch.float32, torch.bfloat16) or not gate_up.is_cpu or gate_up.stride(1) != 1:
        raise ValueError(
            f"native activation: gate_up must be float32 or bfloat16 on the CPU, with stride 1 inside "
            f"a row; it is {gate_up.dtype} on {gate_up.device} with strides {gate_up.stride()}"
        )
    y = gate_up.new_empty(rows, width)
    loaded().quire_gated(
        gate_up.data_ptr(),
        y.data_ptr(),
        rows,
        width,
        gate_up.stride(0),
        number_of(act),
        gate_up.dtype == torch.bfloat16,
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
