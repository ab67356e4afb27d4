"""Copies of weights from host memory to slots of a device, beside the layers that compute.

`InlineCopies` copies at once, in the order of the calls, on a device without streams. `StreamCopies` copies on a CUDA
stream; a CUDA graph captures its copies, and what waits for them. `HostBlock` is what is copied: packed weights of a
module. Knows bytes and addresses. Knows nothing of layers and slots.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.native import memory
from quire.kernels.page_copies import PIECE_BYTES, lock
from quire.platforms.cpu import HUGE_PAGE

ALIGNED = 256  # bytes: tensors begin at a multiple, as memory of a GPU does
Piece = tuple[Tensor, Tensor]  # bytes in host memory, and the memory of the device to which they are copied


class LayerCopies(Protocol):
    """Copies bytes from host memory to a device. Copies are made in the order of the calls."""

    def follow(self) -> None:
        """Later copies start after all work that the device has been given so far."""

    def copy(self, pieces: Sequence[Piece]) -> Callable[[], None]:
        """Begin to copy. Return a function: work that the device is given after its call starts after these copies."""


class InlineCopies(LayerCopies):
    """Copies in the caller's thread."""

    def follow(self) -> None:
        """Do nothing: earlier work has ended."""

    def copy(self, pieces: Sequence[Piece]) -> Callable[[], None]:
        for source, target in pieces:
            target.copy_(source)
        return _nothing


class StreamCopies(LayerCopies):
    """Copies on a stream of its own. The host waits for nothing, so that a CUDA graph can hold all of it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._plain = torch.zeros(1, device=device)

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, pieces: Sequence[Piece]) -> Callable[[], None]:
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            for source, target in pieces:
                target.copy_(source, non_blocking=True)
            arrived.record(self._stream)
        return lambda: self._wait(arrived)

    def _wait(self, arrived: torch.cuda.Event) -> None:
        """Make the current stream wait. A kernel without programmatic dependent launch follows the two streams first:
        kernels that take part read weights before they wait for the kernel before (`quire.kernels.pdl`)."""
        torch.cuda.current_stream(self._device).wait_event(arrived)
        self._plain.fill_(1)


def layer_copies(device: torch.device) -> LayerCopies:
    """Return the copies of a device."""
    return StreamCopies(device) if device.type == "cuda" else InlineCopies()


class HostBlock:
    """Tensors whose content lies in a block of host memory, one behind the other; views of one memory stay views of it.

    num_bytes   of the block, a multiple of ALIGNED
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Copy tensors to a new block, and let them lie there. Their memory is freed where nothing else has it.

        device   to which the block will be copied. If it is a GPU, the block is locked
        Raises ConfigError if the memory cannot be locked.
        """
        spans = _spans(tensors)
        starts, self.num_bytes = dict[int, int](), 0
        for address, (_, first, end) in spans.items():
            starts[address] = self.num_bytes - first
            self.num_bytes += -(-(end - first) // ALIGNED) * ALIGNED
        self._host = _host_memory(self.num_bytes, device)
        for address, (memory_of, first, end) in spans.items():
            content = torch.empty(0, dtype=torch.uint8, device=memory_of.device)
            content.set_(memory_of.untyped_storage(), first, (end - first,), (1,))
            self._host[starts[address] + first : starts[address] + end].copy_(content)
        self._places = [(one, starts[one.untyped_storage().data_ptr()] + _first_byte(one)) for one in tensors]
        self._lie(self._host)

    def lie_in(self, place: Tensor) -> list[Piece]:
        """Let the tensors lie in the device's memory `place` [num_bytes]. Return the copies that bring their content.

        A copy must not cross two pieces of the block, because each was locked by itself.
        """
        self._lie(place)
        return list(zip(self._host.split(PIECE_BYTES), place.split(PIECE_BYTES), strict=True))

    def _lie(self, place: Tensor) -> None:
        for tensor, at in self._places:
            first = (place.storage_offset() + at) // tensor.itemsize
            made = torch.empty(0, dtype=tensor.dtype, device=place.device)
            tensor.data = made.set_(place.untyped_storage(), first, tensor.shape, tensor.stride())


def _spans(tensors: Sequence[Tensor]) -> dict[int, tuple[Tensor, int, int]]:
    """Return address of a storage -> a tensor in it, and the first byte and the end of all these tensors in it."""
    spans = dict[int, tuple[Tensor, int, int]]()
    for tensor in tensors:
        first = _first_byte(tensor)
        last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = first + (last + 1) * tensor.itemsize if tensor.numel() else first
        address = tensor.untyped_storage().data_ptr()
        _, begun, ended = spans.get(address, (tensor, first, end))
        spans[address] = tensor, min(begun, first // ALIGNED * ALIGNED), max(ended, end)
    return spans


def _first_byte(tensor: Tensor) -> int:
    return tensor.storage_offset() * tensor.itemsize


def _host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Return memory of the host, [num_bytes] uint8, locked for a GPU."""
    if device.type != "cuda":
        return memory.empty((num_bytes,), torch.uint8)
    if num_bytes < HUGE_PAGE:  # PyTorch rounds up to a power of two
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    block = memory.empty((num_bytes,), torch.uint8)
    lock(block, block.split(PIECE_BYTES), device, "cpu_offload_gb")
    return block


def _nothing() -> None:
    """Do nothing: the copies have been made."""
