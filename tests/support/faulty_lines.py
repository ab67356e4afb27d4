"""The fault injector of the peer tier: a connection that is slow, loses, corrupts, cuts short, dies or freezes."""

import itertools
import time
import zlib
from collections.abc import Iterator, Sequence

import pytest

from quire.procs import block_share
from quire.procs.block_share import PAGE, BlockLine

FAULTS = ("slow", "lost", "corrupt", "foreign", "short", "killed", "frozen", "longer")


class FaultyLine(BlockLine):
    """Plants a fault in one page after another that a share sends; the sequence repeats.

    "slow" waits; "lost" says that there is no block; "corrupt" flips a bit; "foreign" sends another block's page;
    "short" ends the connection in the middle of a page; "killed" ends it before; "frozen" says nothing for long;
    "longer" announces more bytes than a page has
    """

    faults: Iterator[str] = itertools.cycle([""])
    frozen_seconds = 2.0

    @classmethod
    def plant(cls, monkeypatch: pytest.MonkeyPatch, faults: Sequence[str]) -> None:
        """Make every share of the test send through such connections."""
        monkeypatch.setattr(cls, "faults", itertools.cycle(faults))
        monkeypatch.setattr(block_share, "BlockLine", cls)

    def send_page(self, key: bytes, page: bytes) -> None:
        """See `BlockLine`."""
        fault = next(type(self).faults)
        if fault == "slow":
            time.sleep(0.02)
        if fault == "frozen":
            time.sleep(self.frozen_seconds)
        if fault == "killed":
            self.close()
        if fault in ("corrupt", "short", "longer") and page:
            head = bytearray(PAGE.pack(zlib.crc32(page, zlib.crc32(key)), len(page)))
            if fault == "longer":
                head[4:6] = b"\xff\xff"
            self._end.sendall(head)
            if fault == "short":
                self._end.sendall(page[: len(page) // 2])
                self.close()
            self._end.sendall(bytes([page[0] ^ 4]) + page[1:])
            return
        page = b"" if fault == "lost" else page
        super().send_page(key[::-1] if fault == "foreign" else key, page)
