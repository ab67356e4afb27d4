"""Virtual memory of a device that is host memory, which refuses what a driver would not forgive."""

import ctypes

import torch
from torch import Tensor

from quire.kernels.virtual_memory import VirtualMemory

LOST = 0xA5  # every byte of physical memory at first: nothing may count on what was there before


class FakeVirtualMemory(VirtualMemory):
    """Addresses are those of buffers; physical memory is a number, and its content is lost with it.

    capacity   bytes of physical memory; more are refused as by a full device
    calls      names of the calls
    """

    granularity = 4096

    def __init__(self, capacity: int = 1 << 30) -> None:
        self.capacity = capacity
        self.calls: list[str] = []
        self.physical: dict[int, int] = {}  # handle -> bytes
        self.mapped: dict[int, tuple[int, int]] = {}  # address -> bytes, handle
        self.reserved: dict[int, int] = {}  # address -> bytes
        self._buffers: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._last = 0

    @property
    def used(self) -> int:
        """Bytes of physical memory in use."""
        return sum(self.physical.values())

    def reserve(self, size: int) -> int:
        self._note("reserve", size)
        buffer = ctypes.create_string_buffer(size + self.granularity)
        address = -(-ctypes.addressof(buffer) // self.granularity) * self.granularity
        self._buffers[address], self.reserved[address] = buffer, size
        return address

    def unreserve(self, address: int, size: int) -> None:
        self._note("unreserve", size)
        assert self.reserved.pop(address) == size
        assert not any(address <= at < address + size for at in self.mapped), "still mapped"
        del self._buffers[address]

    def create(self, size: int) -> int:
        self._note("create", size)
        if self.used + size > self.capacity:
            raise OSError("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")
        self._last += 1
        self.physical[self._last] = size
        return self._last

    def release(self, handle: int) -> None:
        self._note("release", 0)
        assert handle not in {each for _, each in self.mapped.values()}, "released while it is mapped"
        del self.physical[handle]

    def map(self, address: int, size: int, handle: int) -> None:
        self._note("map", size)
        assert self.physical[handle] == size, "another size than the memory's"
        assert any(at <= address and address + size <= at + most for at, most in self.reserved.items()), "not reserved"
        assert not any(at < address + size and address < at + each for at, (each, _) in self.mapped.items()), "twice"
        self.mapped[address] = size, handle
        ctypes.memset(address, LOST, size)

    def unmap(self, address: int, size: int) -> None:
        self._note("unmap", size)
        assert self.mapped.pop(address)[0] == size
        ctypes.memset(address, LOST, size)

    def view(self, address: int, size: int, owner: object) -> Tensor:
        memory = (ctypes.c_ubyte * size).from_address(address)
        memory.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _note(self, name: str, size: int) -> None:
        assert size % self.granularity == 0, f"{name} of {size} bytes"
        self.calls.append(name)
