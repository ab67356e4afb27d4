"""Memory of a GPU that other processes of the machine map: the driver's legacy IPC.

    owner    export(pages)              a handle, for the other process
    reader   open(handle) ... close()   the same memory, at an address of this process
             mark(), wait(mark), copy(moves)   copies between addresses, on a stream beside the steps

A handle is that of a whole allocation of the driver, which PyTorch's allocator divides: an offset goes with it. Memory
of expandable segments has no handle. The reader need not see the owner's GPU, which may also be its own. Mapped memory
stays readable when its owner dies, and is not free before it is closed. Knows addresses; nothing of blocks.
"""

import ctypes
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.kernels.driver import call_driver

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
Move = tuple[int, int, int]  # address to write, address to read, bytes


class DeviceIpc(Protocol):
    """Maps memory of devices, and copies from it. Any thread may call it. Faults of the driver are OSErrors."""

    def export(self, pages: Tensor) -> tuple[bytes, int]:
        """Return a handle of the memory in which `pages` lie, and their offset in it."""

    def open(self, handle: bytes) -> int:
        """Map memory of another process, and return its address here."""

    def close(self, address: int) -> None:
        """End a mapping. No copy reads it any more."""

    def mark(self) -> Any:
        """Return a mark behind all work that the device has been given so far by the calling thread."""

    def wait(self, after: Any) -> None:
        """Wait until the work before the mark `after` is done."""

    def copy(self, moves: Iterable[Move]) -> None:
        """Copy. Returns when the last copy has ended."""


class CudaIpc(DeviceIpc):
    """Memory of NVIDIA's GPUs, by libcuda. `device` is that of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._context = device, ctypes.c_void_p()
        number = ctypes.c_int()
        call_driver("cuDeviceGet", ctypes.byref(number), device.index or 0)
        call_driver("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)

    def export(self, pages: Tensor) -> tuple[bytes, int]:
        """See `DeviceIpc`."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        self._enter()
        call_driver(
            "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pages.data_ptr())
        )
        call_driver("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle), pages.data_ptr() - base.value

    def open(self, handle: bytes) -> int:
        """See `DeviceIpc`."""
        if len(handle) != HANDLE_BYTES:
            raise OSError(f"a handle of {len(handle)} bytes")
        address = ctypes.c_uint64()
        self._enter()
        call_driver(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(LAZY_PEER_ACCESS),
        )
        return address.value

    def close(self, address: int) -> None:
        """See `DeviceIpc`."""
        self._enter()
        call_driver("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def mark(self) -> torch.cuda.Event:
        """See `DeviceIpc`."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, after: torch.cuda.Event) -> None:
        """See `DeviceIpc`. Not by the stream: behind a long step its queue would fill, and hold Python's lock."""
        after.synchronize()

    def copy(self, moves: Iterable[Move]) -> None:
        """See `DeviceIpc`."""
        self._enter()
        stream = torch.cuda.Stream(self._device)
        try:
            for target, source, size in moves:
                call_driver(
                    "cuMemcpyAsync",
                    ctypes.c_uint64(target),
                    ctypes.c_uint64(source),
                    ctypes.c_size_t(size),
                    ctypes.c_void_p(stream.cuda_stream),
                )
        finally:
            stream.synchronize()

    def _enter(self) -> None:
        """Make the device's context that of the calling thread."""
        call_driver("cuCtxSetCurrent", self._context)


IMPLEMENTATIONS: dict[str, Callable[[torch.device], DeviceIpc]] = {"cuda": CudaIpc}  # by the device's type


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)
