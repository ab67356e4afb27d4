"""Copies of small tensors to the device and back, for which the host does not wait."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

PINNED = 1 << 20  # values of a copy to pinned memory, at most: pinned memory stays allocated. Larger copies wait


def sent(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copy `numbers` to an int64 tensor on the device, without waiting for the device."""
    return sent_array(np.array(numbers, np.int64), device)


def sent_array(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device, without waiting for it. On a CPU the tensor has the memory of the array."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def fetched(values: Tensor) -> Callable[[], np.ndarray]:
    """Start the copy of `values` to the host. Return a function that waits for it, and returns the array."""
    out = back(values)
    if not values.is_cuda:
        return out.numpy
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> np.ndarray:
        copied.synchronize()
        return out.numpy()

    return wait


def back(values: Tensor) -> Tensor:
    """Start the copy of `values` to the host. Return the host tensor; it is valid once the device has made the copy."""
    out = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda and values.numel() <= PINNED)
    return out.copy_(values, non_blocking=True)
