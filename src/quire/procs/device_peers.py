"""Blocks on GPUs of peers of this machine, copied from one GPU's memory to the other's; see `block_share.py`.

A rank maps the pages of a peer once, for as long as a connection to it lasts. The connection ends soon after the peer:
mapped memory would else stay taken. Each job asks where its blocks are, copies them, and asks again. A block counts if
the peer then lives and the block has been at the same place all the time; there is no checksum.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from quire.contracts.errors import ConfigError
from quire.contracts.step import CopyJob
from quire.kernels.ipc import DeviceIpc, Move
from quire.kernels.mapped import MappedPages
from quire.kvstore.shards import Shard, cut
from quire.procs.block_peers import REFUSED_SECONDS, Place, open_peer
from quire.procs.block_share import BEAT_SECONDS, BROKEN, FROM_SHARE, BlockLine, Locate, Located

LOG = logging.getLogger("quire").getChild("kv")


class PeerDevices:
    """Copies a rank's part of blocks from GPUs of peers. Threads of a mover call what `begin` returns.

    places    in the order of `BlockPeers`
    shard     the part of each block that this rank holds;  pages  address of its page 0
    """

    def __init__(self, places: Iterable[Place], key: bytes, namespace: bytes, shard: Shard, ipc: DeviceIpc,
                 pages: int) -> None:  # fmt: skip
        self._ipc, self._pages, self._page_bytes = ipc, pages, shard.geometry.page_bytes
        self._links = [_Link(f"{place[0]}:{place[1]}", partial(open_peer, place, key, namespace), shard, ipc)
                       for place in dict.fromkeys(places)]  # fmt: skip
        for link in self._links:
            weakref.finalize(self, link.end).atexit = False

    def begin(self) -> Callable[[CopyJob, Sequence[int]], tuple[int, ...]]:
        """Return a function for a thread: it reads blocks of a job, after all work that the device has been given so
        far, and returns the indices of those that failed."""
        return partial(self._fetch, self._ipc.mark())

    def _fetch(self, after: Any, job: CopyJob, part: Sequence[int]) -> tuple[int, ...]:
        failed = set(part)
        for number in sorted({int(job.sources[i]) for i in part}):
            some = [i for i in part if job.sources[i] == number]
            link = self._links[number]
            with link.lock:
                try:
                    if link.opened():
                        failed.difference_update(self._read(link, job, some, after))
                except (ConfigError, *BROKEN) as error:
                    link.close()
                    LOG.warning("KV blocks could not be read from the GPU of the peer %s: %s", link.name, error)
        return tuple(sorted(failed))

    def _read(self, link: "_Link", job: CopyJob, some: Sequence[int], after: Any) -> Iterator[int]:
        """Yield the indices of the blocks that were there before and after the copy."""
        keys = [job.keys[i] for i in some]
        before = link.locate(keys)
        self._ipc.copy((move for i, (block, _) in zip(some, before, strict=True) if block
                        for move in link.moves(block, self._pages + int(job.targets[i]) * self._page_bytes)), after)
        for i, found, again in zip(some, before, link.locate(keys), strict=True):
            if found[0] and found == again:
                yield i


class _Link:
    """A connection to a peer, and its mapped pages. `lock` is held by its user."""

    def __init__(self, name: str, connect: Callable[[], tuple[BlockLine, tuple[Shard, ...]]], shard: Shard,
                 ipc: DeviceIpc) -> None:  # fmt: skip
        self.name, self.lock = name, threading.Lock()
        self._connect, self._shard, self._ipc = connect, shard, ipc
        self._ending = threading.Event()
        self._line: BlockLine | None = None
        self._pages: MappedPages | None = None
        self._ranges: tuple[tuple[int, int, int, int], ...] = ()
        self._refused, self._said = float("-inf"), ""  # when and why pages could not be mapped

    def opened(self) -> bool:
        """Connect and map the pages, if that is still to do. Returns False where they cannot be mapped."""
        if self._line is not None or time.monotonic() < self._refused + REFUSED_SECONDS:
            return self._line is not None
        self._line, shards = self._connect()
        try:
            ranges = cut(self._shard, shards)
            self._ranges = tuple((one.rank, one.start, one.length, one.target) for one in ranges)
            self._pages = MappedPages(self._ipc, {one.rank: shards[one.rank].memory for one in ranges})
        except (ConfigError, OSError) as error:
            self.close()
            if self._said != str(error):
                LOG.warning("the GPU memory of the peer %s, on this machine, cannot be mapped (%s): its KV blocks come "
                            "through host memory, or over TCP.", self.name, error)  # fmt: skip
            self._refused, self._said = time.monotonic(), str(error)
            return False
        threading.Thread(target=self._watch, args=(self._line,), name="quire-kv-ipc-watch", daemon=True).start()
        return True

    def locate(self, keys: list[bytes]) -> list[tuple[int, int]]:
        """Ask the peer where blocks are. Raises the errors in `BROKEN`."""
        assert self._line is not None and self._pages is not None, "the connection is closed"
        self._line.send(Locate(keys))
        answer = self._line.receive(FROM_SHARE)
        if not isinstance(answer, Located) or len(answer.places) != len(keys):
            raise ValueError("it does not say where its blocks are")
        if not all(self._pages.has(block) for block, _ in answer.places):
            raise ValueError("it has a block outside of its memory")
        return answer.places

    def moves(self, block: int, target: int) -> Iterable[Move]:
        """Return the copies that bring a block of the peer to a page at the address `target`."""
        assert self._pages is not None, "nothing is mapped"
        return self._pages.moves(block, self._ranges, target)

    def close(self) -> None:
        """End the connection and the mapping; the next job begins anew."""
        if self._line is not None:
            self._line.close()
        if self._pages is not None:
            self._pages.close()
        self._line = self._pages = None

    def end(self) -> None:
        """End soon, without a wait: no job comes any more."""
        self._ending.set()

    def _watch(self, line: BlockLine) -> None:
        """Close what is mapped when the peer is gone, or when this rank's mover is. Keep the connection alive."""
        while True:
            ending = self._ending.wait(BEAT_SECONDS)
            with self.lock:
                if self._line is not line:
                    return
                with suppress(*BROKEN):
                    if not ending:
                        self.locate([])
                        continue
                self.close()
                return
