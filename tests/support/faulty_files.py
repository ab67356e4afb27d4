"""The fault injector of the disk tier: a file system that is slow, loses, corrupts, cuts short, or is full."""

import errno
import itertools
import os
import time
from collections.abc import Sequence

from quire.kvstore.files import FileSystem

READ_FAULTS = ("", "slow", "lost", "error", "short", "long", "corrupt", "foreign")
WRITE_FAULTS = ("", "slow", "full", "half")


class FaultyFiles(FileSystem):
    """Plants a fault in one call after another; the sequences repeat.

    reads    "slow" waits; "lost" deletes the file first; "error" fails; "short" and "long" change its length;
             "corrupt" flips a bit of the page; "foreign" changes the digest in the header
    writes   "slow" waits; "full" fails; "half" fails after half of the bytes
    """

    def __init__(self, reads: Sequence[str] = ("",), writes: Sequence[str] = ("",), seconds: float = 0.002) -> None:
        assert set(reads) <= set(READ_FAULTS) and set(writes) <= set(WRITE_FAULTS)
        self._reads, self._writes, self._seconds = itertools.cycle(reads), itertools.cycle(writes), seconds

    def read(self, path: str, header: bytearray, page: memoryview) -> int:
        """See `FileSystem`."""
        fault = next(self._reads)
        if fault == "slow":
            time.sleep(self._seconds)
        if fault == "error":
            raise OSError(errno.EIO, "planted")
        if fault == "lost":
            os.unlink(path)
        size = os.path.getsize(path)
        with open(path, "r+b") as file:
            if fault == "short":
                file.truncate(size // 2)
            if fault == "long":
                file.seek(size)
                file.write(b"x")
            if fault in ("corrupt", "foreign"):
                at = size - 3 if fault == "corrupt" else 40
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 0x10]))
        return super().read(path, header, page)

    def write(self, path: str, header: bytes, page: memoryview) -> None:
        """See `FileSystem`."""
        fault = next(self._writes)
        if fault == "slow":
            time.sleep(self._seconds)
        if fault == "half":
            super().write(path, header, page[: len(page) // 2])
        if fault in ("full", "half"):
            raise OSError(errno.ENOSPC, "planted")
        super().write(path, header, page)
