"""Copies of pages between a device's arena and host memory: one copy per page.

`InlineCopies` copies at once, on a CPU. `StreamCopies` copies on two CUDA streams, one per direction, beside the steps.
Knows pages by number. Knows nothing of keys and jobs.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.contracts.errors import ConfigError

Ended = Callable[[], bool]  # returns True when a copy has ended; does not wait


class PageCopies(Protocol):
    """Copies pages between two arrays [num_pages, page_bytes], on the device and on the host."""

    def copy(self, sources: Sequence[int], targets: Sequence[int], *, to_host: bool) -> Ended:
        """Begin to copy pages, after all work that the device has been given so far. Return a function to ask."""


class InlineCopies:
    """Copies pages in the caller's thread, on a CPU."""

    def __init__(self, device: Tensor, host: Tensor) -> None:
        self._device, self._host = device, host

    def copy(self, sources: Sequence[int], targets: Sequence[int], *, to_host: bool) -> Ended:
        """Copy pages. See `PageCopies`."""
        read, written = (self._device, self._host) if to_host else (self._host, self._device)
        for source, target in zip(sources, targets, strict=True):
            written[target].copy_(read[source])
        return lambda: True


class StreamCopies:
    """Copies pages on two CUDA streams, whose priority for loads is higher: requests wait for loads.

    A copy waits for the work that the current stream has been given; steps do not wait for copies. `host` is pinned.
    """

    def __init__(self, device: Tensor, host: Tensor) -> None:
        self._device, self._host = device, host
        _, highest = torch.cuda.Stream.priority_range()
        self._streams = {True: torch.cuda.Stream(device.device),
                         False: torch.cuda.Stream(device.device, priority=highest)}

    def copy(self, sources: Sequence[int], targets: Sequence[int], *, to_host: bool) -> Ended:
        """Launch the copies of pages. See `PageCopies`."""
        read, written = (self._device, self._host) if to_host else (self._host, self._device)
        stream, ended = self._streams[to_host], torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(self._device.device))
        with torch.cuda.stream(stream):
            for source, target in zip(sources, targets, strict=True):
                written[target].copy_(read[source], non_blocking=True)
            ended.record(stream)
        return ended.query


def pin(memory: Tensor) -> None:
    """Lock the pages of host memory until the tensor is freed, so that a GPU copies from and to it by itself.

    PyTorch's own pinned memory has a power of two as its size, which wastes up to a half.
    """
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code):
        raise ConfigError(f"{memory.numel() / 2**30:.1f} GiB of host memory cannot be locked for the GPU (CUDA error "
                          f"{int(code)}): lower kv_offload_gb, or raise the limit of locked memory (ulimit -l).")
    weakref.finalize(memory, torch.cuda.cudart().cudaHostUnregister, memory.data_ptr()).atexit = False
