"""silu(gate) * up in one pass; the C side is native.c."""

import torch
from torch import Tensor

from quire.kernels.native.library import loaded, missing
from quire.kernels.select import Support

SUPPORT = Support(devices=frozenset({"cpu"}), dtypes=frozenset({"float32", "bfloat16"}), missing=missing())


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `quire.kernels.activation`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    y = gate_up.new_empty(rows, width)
    loaded().quire_silu_mul(
        gate_up.data_ptr(), y.data_ptr(), rows, width, gate_up.stride(0), gate_up.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )  # fmt: skip
    return y
