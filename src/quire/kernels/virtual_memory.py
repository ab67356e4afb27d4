"""Device memory at addresses that stay: the driver's virtual memory.

    range     | chunk | chunk | chunk | not backed |      addresses that are reserved as long as the range lives
    back      physical memory is made, and mapped behind the chunks that have some
    drop      all physical memory goes back to the driver; the addresses stay reserved

CUDA graphs hold addresses. So they stay valid over `drop` and `back`; only the content is lost. Knows nothing of what
lies in a range.
"""

import ctypes
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.driver import call_driver

CHUNK_BYTES = 512 << 20  # largest piece of physical memory; each one costs four calls of the driver
PINNED, DEVICE, READ_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, ..._READWRITE


class VirtualMemory(Protocol):
    """Reserved addresses of a device, and the physical memory behind them. Faults of the driver are OSErrors.

    granularity   sizes and addresses are multiples of so many bytes
    """

    granularity: int

    def reserve(self, size: int) -> int:
        """Reserve addresses, and return the first one."""

    def unreserve(self, address: int, size: int) -> None:
        """Give reserved addresses back, behind which nothing is mapped."""

    def create(self, size: int) -> int:
        """Make physical memory, and return its handle. Raises OSError when the device has too little."""

    def release(self, handle: int) -> None:
        """Free physical memory, when it is mapped nowhere."""

    def map(self, address: int, size: int, handle: int) -> None:
        """Map physical memory at reserved addresses, for the device to read and write."""

    def unmap(self, address: int, size: int) -> None:
        """End a mapping."""

    def view(self, address: int, size: int, owner: object) -> Tensor:
        """Return mapped memory as bytes [size]. The tensor and its views keep `owner` alive."""


class CudaVirtualMemory(VirtualMemory):
    """Virtual memory of an NVIDIA GPU, by libcuda. For the thread whose current device it is."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # makes the context
        number = ctypes.c_int()
        index = torch.cuda.current_device() if device.index is None else device.index
        call_driver("cuDeviceGet", ctypes.byref(number), index)
        self._device, self._location = device, _Location(DEVICE, number.value)
        self._wanted = _Wanted(PINNED, 0, self._location)
        found = ctypes.c_size_t()
        call_driver("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(self._wanted), ctypes.c_int(0))
        self.granularity = found.value

    def reserve(self, size: int) -> int:
        """See `VirtualMemory`."""
        address = ctypes.c_uint64()
        none = ctypes.c_uint64(0)
        call_driver("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0), none, none)
        return address.value

    def unreserve(self, address: int, size: int) -> None:
        """See `VirtualMemory`."""
        call_driver("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def create(self, size: int) -> int:
        """See `VirtualMemory`."""
        handle = ctypes.c_uint64()
        call_driver(
            "cuMemCreate",
            ctypes.byref(handle),
            ctypes.c_size_t(size),
            ctypes.byref(self._wanted),
            ctypes.c_uint64(0),
        )
        return handle.value

    def release(self, handle: int) -> None:
        """See `VirtualMemory`."""
        call_driver("cuMemRelease", ctypes.c_uint64(handle))

    def map(self, address: int, size: int, handle: int) -> None:
        """See `VirtualMemory`."""
        at, length, access = ctypes.c_uint64(address), ctypes.c_size_t(size), _Access(self._location, READ_WRITE)
        call_driver("cuMemMap", at, length, ctypes.c_size_t(0), ctypes.c_uint64(handle), ctypes.c_uint64(0))
        try:
            call_driver("cuMemSetAccess", at, length, ctypes.byref(access), ctypes.c_size_t(1))
        except OSError:
            self.unmap(address, size)
            raise

    def unmap(self, address: int, size: int) -> None:
        """See `VirtualMemory`."""
        call_driver("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def view(self, address: int, size: int, owner: object) -> Tensor:
        """See `VirtualMemory`."""
        return torch.as_tensor(_Interface(address, size, owner), device=self._device)


class MappedRange:
    """A range of reserved addresses, behind whose beginning there is physical memory.

    address, size   of the range, in bytes; the size is a multiple of the granularity
    backed          bytes from the beginning on that have physical memory
    """

    def __init__(self, memory: VirtualMemory, size: int) -> None:
        self._memory, self.size = memory, -(-size // memory.granularity) * memory.granularity
        self.address = memory.reserve(self.size)
        self._chunks: list[tuple[int, int, int]] = []  # address, size, handle
        self.close: Callable[[], object] = weakref.finalize(self, _close, memory, self.address, self.size, self._chunks)

    @property
    def backed(self) -> int:
        """Bytes from the beginning on that have physical memory."""
        return sum(size for _, size, _ in self._chunks)

    def back(self, upto: int | None = None) -> None:
        """Make physical memory behind the first `upto` bytes (None: all) that have none. Its content is undefined.

        Raises OSError when the device has too little; chunks that were mapped before stay.
        """
        wanted = self.size if upto is None else min(upto, self.size)
        while (backed := self.backed) < wanted:
            size = min(CHUNK_BYTES // self._memory.granularity * self._memory.granularity, self.size - backed)
            handle = self._memory.create(size)
            try:
                self._memory.map(self.address + backed, size, handle)
            except OSError:
                self._memory.release(handle)
                raise
            self._chunks.append((self.address + backed, size, handle))

    def drop(self) -> None:
        """Give all physical memory back. No work of the device may use it any more."""
        _drop(self._memory, self._chunks)

    def view(self, size: int) -> Tensor:
        """Return the first bytes [size], which are backed. The tensor keeps the range alive."""
        assert size <= self.backed, "a view of memory that is not there"
        return self._memory.view(self.address, size, self)


IMPLEMENTATIONS: dict[str, Callable[[torch.device], VirtualMemory]] = {"cuda": CudaVirtualMemory}  # by device type


def _drop(memory: VirtualMemory, chunks: list[tuple[int, int, int]]) -> None:
    while chunks:
        address, size, handle = chunks.pop()
        memory.unmap(address, size)
        memory.release(handle)


def _close(memory: VirtualMemory, address: int, size: int, chunks: list[tuple[int, int, int]]) -> None:
    _drop(memory, chunks)
    memory.unreserve(address, size)


class _Interface:
    """Memory as PyTorch takes it from others, without a copy. The tensor keeps this object, and so `owner`."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Wanted(ctypes.Structure):
    """CUmemAllocationProp. The last field is `allocFlags`, 8 bytes of zeros."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))
