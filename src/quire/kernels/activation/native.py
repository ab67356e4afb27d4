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
