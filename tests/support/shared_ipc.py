"""Devices of which other processes map the memory, without a GPU: their pages lie in files of Linux without a name."""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from quire.kernels import ipc
from quire.kernels.native import memory
from quire.kvstore import arena

PAGES: dict[int, str] = {}  # address of memory that can be exported -> path of its file


def pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Return memory that can be exported. Stands for `memory.empty`."""
    tensor, path = memory.shared(shape, dtype)
    PAGES[tensor.data_ptr()] = path
    return tensor


class SharedIpc(ipc.DeviceIpc):
    """See `quire.kernels.ipc.DeviceIpc`.

    mapped        address of a mapping -> the map, of all instances
    on_copy       functions to call after each copy, before its end is told
    refused       reason why memory cannot be mapped; "": it can
    """

    mapped: dict[int, Any] = {}
    on_copy: list[Callable[[], None]] = []
    refused = ""
    num_copied = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def export(self, pages: torch.Tensor) -> tuple[bytes, int]:
        """See `DeviceIpc`."""
        start = max(start for start in PAGES if start <= pages.data_ptr())
        return PAGES[start].encode(), pages.data_ptr() - start

    def open(self, handle: bytes) -> int:
        """See `DeviceIpc`."""
        if self.refused:
            raise OSError(self.refused)
        file = os.open(handle.decode(), os.O_RDWR)
        found = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
        os.close(file)
        self.mapped[found.data_ptr()] = found
        return found.data_ptr()

    def close(self, address: int) -> None:
        """See `DeviceIpc`."""
        del self.mapped[address]

    def mark(self) -> str:
        """See `DeviceIpc`."""
        return "mark"

    def wait(self, after: Any) -> None:
        """See `DeviceIpc`."""
        assert after == "mark"

    def copy(self, moves: Iterable[ipc.Move]) -> None:
        """See `DeviceIpc`."""
        for target, source, size in moves:
            assert any(
                start <= source and source + size <= start + found.numel() for start, found in self.mapped.items()
            ), "a copy from memory that is not mapped"
            ctypes.memmove(target, source, size)
            SharedIpc.num_copied += 1
        for one in list(self.on_copy):
            one()


def share_devices(patch: pytest.MonkeyPatch) -> None:
    """Let CPUs of this process share the memory of their caches, as GPUs do."""
    patch.setitem(ipc.IMPLEMENTATIONS, "cpu", SharedIpc)
    patch.setattr(SharedIpc, "on_copy", [])

    class Memory:
        empty = staticmethod(pages)

    patch.setattr(arena, "memory", Memory)
