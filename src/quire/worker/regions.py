"""Memory of weights and KV cache that sleep frees and wake brings back at the same addresses.

a CPU   pages go back to the system, which gives others at the first touch; weights stay where they are at level 1
a GPU   `kernels/virtual_memory.py`; at level 1 weights lie in host memory meanwhile
"""

import ctypes
import mmap
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.native import memory
from quire.kernels.virtual_memory import MappedRange, VirtualMemory

LEAST_BYTES = 64 << 10  # smaller tensors stay: constants of layers are among them, and no file brings these back
MOVED_BYTES = 1 << 30
PIECE_BYTES = 256 << 20  # of pinned memory, whose sizes PyTorch rounds up to powers of 2
ALIGN = 512  # bytes; what PyTorch's allocator gives


class Region(Protocol):
    """Tensors whose memory can be freed. Between `sleep` and `wake` nobody may read or write them."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor without content, in memory of this region."""

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Take tensors in, which keep their content. Those with less than `LEAST_BYTES` stay as they are."""

    def sleep(self, *, keep: bool) -> None:
        """Free the memory. No work of the device may use it. keep: bring the content back in `wake`"""

    def wake(self) -> None:
        """Bring the memory back. Content that was not kept is undefined."""

    def clear(self) -> None:
        """Make all numbers finite, after a `wake` without content."""


class HostPages(Region):
    """A region of a CPU. Its tensors keep addresses, because pages alone go back to the system."""

    def __init__(self) -> None:
        self._found: dict[int, int] = {}  # address -> bytes of the tensors' storages

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Region`."""
        tensor = memory.empty(shape, dtype, device)
        self._add(tensor)
        return tensor

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """See `Region`."""
        for tensor in tensors:
            if tensor.layout == torch.strided and tensor.untyped_storage().nbytes() >= LEAST_BYTES:
                self._add(tensor)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._found[storage.data_ptr()] = storage.nbytes()

    def sleep(self, *, keep: bool) -> None:
        """See `Region`. Content that is kept stays in place: it is in host memory already."""
        if keep or not hasattr(mmap, "MADV_DONTNEED"):
            return
        madvise, page = ctypes.CDLL(None).madvise, mmap.PAGESIZE
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for address, size in self._found.items():
            first, end = -(-address // page) * page, (address + size) // page * page
            if end > first:
                madvise(first, end - first, mmap.MADV_DONTNEED)

    def wake(self) -> None:
        """See `Region`. The system gives zeros at the first touch."""

    def clear(self) -> None:
        """See `Region`."""


class MappedRegion(Region):
    """A region of a GPU, in ranges of reserved addresses."""

    def __init__(self, virtual: VirtualMemory, device: torch.device) -> None:
        self._virtual, self._device = virtual, device
        self._ranges: list[MappedRange] = []
        self._sizes: list[int] = []
        self._kept: list[list[Tensor]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of physical memory that the region has when it is awake."""
        return sum(one.size for one in self._ranges)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Region`. Raises torch.OutOfMemoryError when the device has too little memory."""
        size = torch.empty(shape, dtype=dtype, device="meta").nbytes
        if not size:
            return torch.empty(shape, dtype=dtype, device=device)
        made = self._add(size)
        self._back(made)
        return made.view(size).view(dtype).view(shape)

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """See `Region`. Every tensor is moved, with those that share its memory among `tensors`.

        Memory is moved piece by piece, so the device has at most one of the largest pieces twice.
        """
        sharing: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.device.type == self._device.type and tensor.untyped_storage().nbytes() >= LEAST_BYTES:
                sharing.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        sizes = [-(-same[0].untyped_storage().nbytes() // ALIGN) * ALIGN for same in sharing.values()]
        if not sizes:
            return
        made, at, moved = self._add(sum(sizes)), 0, 0
        for same, size in zip(list(sharing.values()), sizes, strict=True):
            self._back(made, at + size)
            whole = made.view(at + size)
            old = same[0].untyped_storage()
            whole[at : at + old.nbytes()].copy_(torch.empty(0, dtype=torch.uint8, device=self._device).set_(old))
            for tensor in same:
                offset = at // tensor.itemsize + tensor.storage_offset()
                shape = tensor.shape, tensor.stride()
                tensor.set_(whole.untyped_storage(), offset, *shape)  # type: ignore[call-overload]
            at += size
            del old
            moved += size
            if moved >= MOVED_BYTES and self._device.type == "cuda":  # else PyTorch keeps what was moved
                torch.cuda.empty_cache()
                moved = 0

    def sleep(self, *, keep: bool) -> None:
        """See `Region`."""
        if keep:
            self._kept = [self._saved(made, size) for made, size in zip(self._ranges, self._sizes, strict=True)]
        for made in self._ranges:
            made.drop()

    def wake(self) -> None:
        """See `Region`. Raises torch.OutOfMemoryError when others have taken the memory: then call it again."""
        for made in self._ranges:
            self._back(made)
        for made, size, kept in zip(self._ranges, self._sizes, self._kept, strict=False):
            for piece, own in zip(made.view(size).split(PIECE_BYTES), kept, strict=True):
                piece.copy_(own, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._kept = []

    def clear(self) -> None:
        """See `Region`."""
        for made, size in zip(self._ranges, self._sizes, strict=True):
            made.view(size).zero_()

    def _saved(self, made: MappedRange, size: int) -> list[Tensor]:
        """Return a copy of a range in host memory that a GPU reads fast, in pieces. PyTorch keeps it for later."""
        pinned = self._device.type == "cuda"
        pieces = made.view(size).split(PIECE_BYTES)
        return [torch.empty(len(one), dtype=torch.uint8, pin_memory=pinned).copy_(one) for one in pieces]

    def _add(self, size: int) -> MappedRange:
        made = MappedRange(self._virtual, size)
        self._ranges.append(made)
        self._sizes.append(size)
        return made

    def _back(self, made: MappedRange, upto: int | None = None) -> None:
        try:
            made.back(upto)
        except OSError as error:
            raise torch.OutOfMemoryError(f"no memory for {made.size - made.backed:,} bytes ({error})") from error
