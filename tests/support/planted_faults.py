"""Faults of files and connections, which tests plant in the tiers of KV blocks of engines in their process.

    read, write               a file of the disk tier
    hello, hear, tell, page   a connection of a share: before it knows the reader, when it has received a message, when
                              it names its blocks, when it sends one

`read=ok/corrupt` plants a fault in every second read: a place has a list of faults, one for each call, which repeats.
"""

import errno
import itertools
import os
import socket
import time
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from quire.kvnet.block_share import PAGE, BlockLine, BlockShare
from quire.kvstore.files import FileSystem

FAULTS = {
    "read": "ok slow frozen lost error short long corrupt foreign",
    "write": "ok slow frozen full half",
    **dict.fromkeys(("hello", "hear", "tell"), "ok slow frozen killed"),
    "page": "ok slow frozen killed lost corrupt foreign short longer",
}


PAGE_FAULTS = FAULTS["page"].split()[1:]
PHASES = [f"{place}={fault}" for place in ("hello", "hear", "tell") for fault in ("killed", "frozen")]


def plant_lines(monkeypatch: pytest.MonkeyPatch, *plans: str) -> None:
    """Make every share of the test send through connections with these faults. Frozen ones are silent for 2 s."""
    faults = Faults(plans, frozen=2.0)
    monkeypatch.setattr(BlockShare, "line", staticmethod(partial(FaultyLine, faults=faults)))


def plant_files(monkeypatch: pytest.MonkeyPatch, *plans: str) -> None:
    """Make every engine that the test assembles read and write the files of its disk tier with these faults."""
    faults = Faults(plans)
    monkeypatch.setattr("quire.assemble.offload.FileSystem", lambda: FaultyFiles(faults))


class Faults:
    """Faults by place, in calls of any thread. `frozen`: seconds."""

    def __init__(self, plans: Sequence[str], frozen: float = 20.0) -> None:
        self._seconds, self._places = {"slow": 0.02, "frozen": frozen}, dict[str, Iterator[str]]()
        for place, _, faults in (plan.partition("=") for plan in plans):
            assert set(faults.split("/")) <= set(FAULTS.get(place, "").split()), f"{place}={faults} is unknown"
            self._places[place] = itertools.cycle(faults.split("/"))

    def strike(self, place: str) -> str:
        """Return the fault of the next call at a place, after its wait."""
        fault = next(self._places[place]) if place in self._places else "ok"
        time.sleep(self._seconds.get(fault, 0))
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


class FaultyLine(BlockLine):
    """A connection of a share that is slow or dies in any phase, and whose pages come damaged."""

    def __init__(self, end: socket.socket, faults: Faults) -> None:
        super().__init__(end)
        self._faults = faults
        self._strike("hello")

    def send(self, message: Any) -> None:
        """See `BlockLine`."""
        self._strike("tell")
        super().send(message)

    def receive(
        self, decoder: msgspec.msgpack.Decoder[msgspec.Struct], seconds: float = float("inf")
    ) -> msgspec.Struct:
        """See `BlockLine`."""
        message = super().receive(decoder, seconds)
        self._strike("hear")
        return message

    def send_page(self, key: bytes, data: bytes | memoryview, block: int = 0, *, bare: bool = False) -> None:
        """See `BlockLine`. "foreign" sends a page of another key; "short" dies in the middle of what it sends."""
        fault = self._strike("page")
        if fault in ("corrupt", "short", "longer") and data:
            wrong = bytes([data[0] ^ 4]) + data[1:]
            checksum = zlib.crc32(wrong if bare else data, zlib.crc32(key))
            sent = PAGE.pack(checksum, len(data) + (fault == "longer"), block) + wrong * (not bare)
            if fault == "short":
                self._end.sendall(sent[: len(sent) // 2])
                self.end()
            self._end.sendall(sent)
            return
        super().send_page(key[::-1] if fault == "foreign" else key, b"" if fault == "lost" else data, block, bare=bare)

    def _strike(self, place: str) -> str:
        if (fault := self._faults.strike(place)) == "killed":
            self.end()
        return fault
