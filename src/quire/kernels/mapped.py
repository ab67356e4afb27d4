"""Pages of a device that processes of the same machine map through a `DeviceIpc`; see `ipc.py`. Never imports torch."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.ipc import DeviceIpc

LOG = logging.getLogger("quire").getChild("kv")


class ExportedPages(msgspec.Struct, frozen=True, array_like=True):
    """Pages of a device, for another process.

    machine   name of the machine since it was started
    handle    of the memory; page 0 begins at the byte `offset` of it
    """

    machine: str
    handle: bytes
    offset: int
    page_bytes: int
    num_pages: int


@lru_cache
def machine() -> str:
    """Return a name of this machine that it has until it is started again; "" on other systems than Linux."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


def export(ipc: "DeviceIpc", pages: "Tensor") -> ExportedPages | None:
    """Return pages [num_pages, page_bytes] for other processes of this machine; None if the driver refuses."""
    try:
        handle, offset = ipc.export(pages)
    except OSError as error:
        LOG.warning(
            "other engines cannot map the GPU memory of this one (%s; PyTorch's expandable_segments must be "
            "off): they read its KV blocks through host memory, or over TCP.",
            error,
        )
        return None
    return ExportedPages(machine(), handle, offset, pages.shape[1], pages.shape[0])


def mappable(memories: Iterable[ExportedPages | None]) -> bool:
    """True when all of these pages are on this machine."""
    return all(one is not None and one.machine == machine() != "" for one in memories)


class MappedPages:
    """Pages of some ranks of another engine, until `close`. Raises OSError if they cannot be mapped."""

    def __init__(
        self,
        ipc: "DeviceIpc",
        memories: Sequence[ExportedPages | None],
        cuts: Sequence[Sequence[tuple[int, int, int, int]]],
    ) -> None:
        """Map pages of the ranks in `cuts`: (rank, start, bytes, offset in the target) of each page, by KV group."""
        self._ipc, self._cuts, self._addresses = ipc, cuts, dict[int, int]()
        ranks = {rank for ranges in cuts for rank, *_ in ranges}
        self._memories = {rank: one for rank, one in enumerate(memories) if rank in ranks and one is not None}
        if not mappable(memories[rank] for rank in ranks):
            raise OSError("it shares no GPU of this machine")
        try:
            for rank, one in self._memories.items():
                self._addresses[rank] = ipc.open(one.handle)
        except BaseException:
            self.close()
            raise

    def has(self, block: int) -> bool:
        """True when every rank has a page of this number."""
        return all(0 <= block < one.num_pages for one in self._memories.values())

    def moves(self, block: int, target: int, group: int = 0) -> Iterator[tuple[int, int, int]]:
        """Yield the copies that bring the ranges of a page of a KV group to the address `target`."""
        for rank, start, size, at in self._cuts[group]:
            memory = self._memories[rank]
            yield target + at, self._addresses[rank] + memory.offset + block * memory.page_bytes + start, size

    def close(self) -> None:
        """End the mapping."""
        for address in self._addresses.values():
            with suppress(OSError):
                self._ipc.close(address)
        self._addresses = {}
