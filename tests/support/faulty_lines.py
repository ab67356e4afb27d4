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
    "longer" announces more bytes than a page has. A reader on this host gets the header of a page alone.
    """

    faults: Iterator[str] = itertools.cycle([""])
    frozen_seconds = 2.0

    @classmethod
    def plant(cls, monkeypatch: pytest.MonkeyPatch, faults: Sequence[str]) -> None:
        """Make every share of the test send through such connections."""
        monkeypatch.setattr(cls, "faults", itertools.cycle(faults))
        monkeypatch.setattr(block_share, "BlockLine", cls)

    def send_page(self, key: bytes, data: bytes | memoryview, block: int = 0, *, bare: bool = False) -> None:
        """See `BlockLine`."""
        fault = next(type(self).faults)
        if fault == "slow":
            time.sleep(0.02)
        if fault == "frozen":
            time.sleep(self.frozen_seconds)
        if fault == "killed":
            self.close()
        if fault in ("corrupt", "short", "longer") and data:
            wrong = bytes([data[0] ^ 4]) + data[1:]
            head = bytearray(PAGE.pack(zlib.crc32(wrong if bare else data, zlib.crc32(key)), len(data), block))
            if fault == "longer":
                head[4:6] = b"\xff\xff"
            sent = bytes(head) + wrong * (not bare)
            self._end.sendall(sent[: len(sent) // 2] if fault == "short" else sent)
            if fault == "short":
                self.close()
            return
        super().send_page(key[::-1] if fault == "foreign" else key, b"" if fault == "lost" else data, block, bare=bare)
