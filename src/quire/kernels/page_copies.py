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
from quire.kernels.native import memory

PIECE_BYTES = 1 << 30
WHOLE = 16  # pages, of a multiple of 256 bytes each, which end where a page of the system ends
Ended = Callable[[], bool]  # returns True when a copy has ended; does not wait


class PageCopies(Protocol):
    """Copies pages between two arrays [num_pages, page_bytes], on the device and on the host."""

    def copy(self, sources: Sequence[int], targets: Sequence[int], *, to_host: bool) -> Ended:
        """Begin to copy pages, after all work that the device has been given so far. Return a function to ask."""


class InlineCopies(PageCopies):
    """Copies pages in the caller's thread, on a CPU."""

    def __init__(self, device: Tensor, host: Tensor) -> None:
        self._device, self._host = device, host

    def copy(self, sources: Sequence[int], targets: Sequence[int], *, to_host: bool) -> Ended:
        read, written = (self._device, self._host) if to_host else (self._host, self._device)
        for source, target in zip(sources, targets, strict=True):
            written[target].copy_(read[source])
        return lambda: True


class StreamCopies(PageCopies):
    """Copies pages on two CUDA streams, of no higher priority than the steps, which upload small tables meanwhile.

    A copy waits for the work that the current stream has been given; steps do not wait for copies. `host` is pinned.
    """

    def __init__(self, device: Tensor, host: Tensor) -> None:
        self._device, self._host = device, host
        self._streams = {way: torch.cuda.Stream(device.device) for way in (True, False)}

    def copy(self, sources: Sequence[int], targets: Sequence[int], *, to_host: bool) -> Ended:
        read, written = (self._device, self._host) if to_host else (self._host, self._device)
        stream, ended = self._streams[to_host], torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(self._device.device))
        with torch.cuda.stream(stream):
            for source, target in zip(sources, targets, strict=True):
                written[target].copy_(read[source], non_blocking=True)
            ended.record(stream)
        return ended.query


def pin(pages: Tensor, device: torch.device) -> None:
    """Lock pages [N, page_bytes] of host memory until the tensor is freed, so that the GPU `device` copies them itself.

    PyTorch's own pinned memory has a power of two as its size, which wastes up to a half. The memory is locked in
    pieces, because a call of the driver takes less than 512 GiB, and 2 GiB in Linux 6.11 to 6.13. A page lies in one
    piece, because a copy must not cross two of them.
    """
    piece = WHOLE * max(1, PIECE_BYTES // (WHOLE * pages.shape[1]))
    lock(pages, pages.split(piece), device, "kv_offload_gb")


def lock(block: Tensor, pieces: Sequence[Tensor], device: torch.device, option: str) -> None:
    """Lock a block of host memory, piece by piece, until the tensor `block` is freed.

    option   the option that asked for the memory
    Raises ConfigError if the driver refuses.
    """
    memory.populate(block)
    cudart, locked = torch.cuda.cudart(), list[int]()
    weakref.finalize(block, _unpin, locked, device).atexit = False
    for piece in pieces:
        if code := int(cudart.cudaHostRegister(piece.data_ptr(), piece.numel(), 0)):
            raise ConfigError(
                f"{block.numel() / 2**30:.1f} GiB of host memory cannot be locked for the GPU (CUDA "
                f"error {code}): lower {option}, or raise the limit of locked memory (ulimit -l)."
            )
        locked.append(piece.data_ptr())


def _unpin(locked: list[int], device: torch.device) -> None:
    torch.cuda.synchronize(device)  # a copy may still be running
    for pointer in locked:
        torch.cuda.cudart().cudaHostUnregister(pointer)
