"""Copies of small tensors to the device and back, for which the host does not wait."""

from collections.abc import Sequence

import torch
from torch import Tensor

PINNED = 1 << 20  # values of a copy to pinned memory, at most: pinned memory stays allocated. Larger copies wait


def sent(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copy `numbers` to an int64 tensor on the device, without waiting for the device."""
    host = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def back(values: Tensor) -> Tensor:
    """Start the copy of `values` to the host. Return the host tensor; it is valid once the device has made the copy."""
    out = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda and values.numel() <= PINNED)
    return out.copy_(values, non_blocking=True)
