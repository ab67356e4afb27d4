"""Faults planted in the tiers of KV blocks, to see an engine survive: by tests, and by the hidden flag --kv-faults.

    read, write               a file of the disk tier
    copy                      a job between device and host
    hello, hear, tell, page   a connection of a share: before it knows the reader, when it has received a message, when
                              it names its blocks, when it sends one

`read=ok/corrupt` plants a fault in every second read: a place has a list of faults, one for each call, which repeats.
"""

import errno
import itertools
import logging
import os
import socket
import time
import zlib
from collections.abc import Iterator, Sequence

import msgspec

from quire.contracts.errors import ConfigError
from quire.kvstore.files import FileSystem
from quire.kvstore.page_copies import Ended, PageCopies
from quire.procs.block_share import PAGE, BlockLine

LOG = logging.getLogger("quire").getChild("kv")
WAITS = ("ok", "slow", "frozen")
FAULTS = {
    "read": (*WAITS, "lost", "error", "short", "long", "corrupt", "foreign"),
    "write": (*WAITS, "full", "half"),
    "copy": WAITS,
    **dict.fromkeys(("hello", "hear", "tell"), (*WAITS, "killed")),
    "page": (*WAITS, "killed", "lost", "corrupt", "foreign", "short", "longer"),
}


class Faults:
    """Faults by place, as `plans` say, in calls of any thread. Raises ConfigError for an unknown one.

    slow, frozen   seconds that a call waits
    """

    def __init__(self, plans: Sequence[str], slow: float = 0.05, frozen: float = 20.0) -> None:
        self._seconds, self._places = {"slow": slow, "frozen": frozen}, dict[str, Iterator[str]]()
        for place, _, names in (plan.partition("=") for plan in plans):
            if not set(faults := names.split("/")) <= set(FAULTS.get(place, ())):
                known = "; ".join(f"{place}: {', '.join(names)}" for place, names in FAULTS.items())
                raise ConfigError(f"kv_faults: {place}={names} is unknown: give a place and its faults, such as "
                                  f"read=ok/corrupt, of {known}.")  # fmt: skip
            self._places[place] = itertools.cycle(faults)
        LOG.warning("Faults are planted in the tiers of KV blocks: %s.", ", ".join(plans))

    def draw(self, place: str) -> tuple[str, float]:
        """Return the fault of the next call at a place, and how long the call waits."""
        fault = next(self._places.get(place, iter(WAITS)))
        return fault, self._seconds.get(fault, 0)

    def strike(self, place: str) -> str:
        """Return the fault of the next call at a place, after its wait."""
        fault, seconds = self.draw(place)
        time.sleep(seconds)
        return fault


class FaultyFiles(FileSystem):
    """Files that are slow or lost, come damaged, or do not fit on the disk."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def read(self, path: str, header: bytearray, page: memoryview) -> int:
        """See `FileSystem`. "foreign" damages the digest in the header."""
        fault = self._faults.strike("read")
        if fault == "error":
            raise OSError(errno.EIO, "planted")
        if fault == "lost":
            os.unlink(path)
        length = super().read(path, header, page)
        if fault in ("corrupt", "foreign"):
            (page if fault == "corrupt" else header)[40] ^= 16
        return length + {"short": -1, "long": 1}.get(fault, 0)

    def write(self, path: str, header: bytes, page: memoryview) -> None:
        """See `FileSystem`. "half" fails after half of the bytes."""
        fault = self._faults.strike("write")
        super().write(path, header, page[: {"full": 0, "half": len(page) // 2}.get(fault, len(page))])
        if fault in ("full", "half"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FaultyCopies(PageCopies):
    """Copies between device and host that end late. Nothing checks their bytes, so none is damaged."""

    def __init__(self, copies: PageCopies, faults: Faults) -> None:
        self._copies, self._faults = copies, faults

    def copy(self, sources: Sequence[int], targets: Sequence[int], *, to_host: bool) -> Ended:
        """See `PageCopies`."""
        ended, until = self._copies.copy(sources, targets, to_host=to_host), time.monotonic()
        until += self._faults.draw("copy")[1]
        return lambda: time.monotonic() >= until and ended()


class FaultyLine(BlockLine):
    """A connection of a share that is slow or dies in any phase, and whose pages come damaged."""

    def __init__(self, end: socket.socket, faults: Faults) -> None:
        super().__init__(end)
        self._faults = faults
        self._strike("hello")

    def send(self, message: msgspec.Struct) -> None:
        """See `BlockLine`."""
        self._strike("tell")
        super().send(message)

    def receive(self, decoder: msgspec.msgpack.Decoder[msgspec.Struct]) -> msgspec.Struct:
        """See `BlockLine`."""
        message = super().receive(decoder)
        self._strike("hear")
        return message

    def send_page(self, key: bytes, page: bytes) -> None:
        """See `BlockLine`. "foreign" sends a page of another key; "short" dies in the middle of the page."""
        fault = self._strike("page")
        if fault in ("corrupt", "short", "longer") and page:
            self._end.sendall(PAGE.pack(zlib.crc32(page, zlib.crc32(key)), len(page) + (fault == "longer")))
            if fault == "short":
                self._end.sendall(page[: len(page) // 2])
                self.end()
            self._end.sendall(bytes([page[0] ^ 4]) + page[1:])
            return
        super().send_page(key[::-1] if fault == "foreign" else key, b"" if fault == "lost" else page)

    def _strike(self, place: str) -> str:
        if (fault := self._faults.strike(place)) == "killed":
            self.end()
        return fault
