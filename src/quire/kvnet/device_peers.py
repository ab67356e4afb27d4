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
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
from torch import Tensor

from quire.contracts.errors import ConfigError
from quire.contracts.step import CopyJob
from quire.kernels.ipc import DeviceIpc
from quire.kernels.mapped import MappedPages
from quire.kv.hashing import group_of
from quire.kvnet.block_peers import READ_SECONDS, REFUSED_SECONDS, PeerReads, Place, open_peer
from quire.kvnet.block_share import BEAT_SECONDS, FROM_SHARE, BlockLine, Locate, Located
from quire.kvnet.share_server import BROKEN
from quire.kvstore.shards import Shard, cut

LOG = logging.getLogger("quire").getChild("kv")


class PeerDevices:
    """Copies a rank's part of blocks from GPUs of peers. Threads of a mover call what `begin` returns.

    places    in the order of `BlockPeers`
    shard     the part of each block that this rank holds
    pages     its pages on the device. A copy that has begun keeps their memory, also when the engine has ended
    """

    def __init__(
        self, places: Iterable[Place], key: bytes, namespace: bytes, shard: Shard, ipc: DeviceIpc, pages: Tensor
    ) -> None:
        self._ipc, self._pages, self._page_bytes = ipc, pages, shard.geometry.page_bytes
        self._reads = PeerReads(places, "the GPU")
        self._links = [
            _PeerLink(f"{place[0]}:{place[1]}", partial(open_peer, place, key, namespace), shard, ipc)
            for place in self._reads.places
        ]
        for link in self._links:
            weakref.finalize(self, link.ending.put, None).atexit = False

    def begin(self) -> Callable[[CopyJob, Sequence[int]], tuple[int, ...]]:
        """Return a function for a thread: it reads blocks of a job, after all work that the device has been given so
        far, and returns the indices of those that failed."""
        return partial(self._fetch, self._ipc.mark())

    def _fetch(self, after: Any, job: CopyJob, part: Sequence[int]) -> tuple[int, ...]:
        assert len(part) == len(job.keys)
        self._ipc.wait(after)
        return self._reads.read(job.sources.tolist(), partial(self._read, job))

    def _read(self, job: CopyJob, number: int, some: Sequence[int]) -> Iterator[int]:
        """Yield the indices of the blocks that were there before and after the copy."""
        link, keys, pages = self._links[number], [job.keys[i] for i in some], self._pages.data_ptr()
        with link.lock:
            if self._reads.avoids(number):  # silent while this job waited for its turn
                return
            try:
                if (theirs := link.opened()) is None:
                    return
                before = link.locate(keys)
                self._ipc.copy(
                    (
                        move
                        for i, (block, _) in zip(some, before, strict=True)
                        if block
                        for move in theirs.moves(
                            block, pages + int(job.targets[i]) * self._page_bytes, group_of(job.keys[i])
                        )
                    )
                )
                again = link.locate(keys)
            except (ConfigError, *BROKEN) as error:
                link.close()
                if isinstance(error, TimeoutError):
                    self._reads.avoid(number)  # before the next job has its turn
                raise
        yield from (i for i, found, now in zip(some, before, again, strict=True) if found[0] and found == now)


class _PeerLink:
    """A connection to a peer, and its mapped pages. `lock` is held by its user. `ending` has an entry when no
    job comes any more."""

    def __init__(
        self, name: str, connect: Callable[[], tuple[BlockLine, tuple[Shard, ...]]], shard: Shard, ipc: DeviceIpc
    ) -> None:
        self.lock, self.ending = threading.Lock(), SimpleQueue[None]()  # a finalizer may put in at any time
        self._name, self._connect, self._shard, self._ipc = name, connect, shard, ipc
        self._line: BlockLine | None = None
        self._pages: MappedPages | None = None
        self._refused, self._said = float("-inf"), ""  # when and why pages could not be mapped

    def opened(self) -> MappedPages | None:
        """Connect and map the pages, if that is still to do. Returns None where they cannot be mapped."""
        if self._line is not None or time.monotonic() < self._refused + REFUSED_SECONDS:
            return self._pages
        self._line, shards = self._connect()
        try:
            cuts = [tuple(map(msgspec.structs.astuple, ranges)) for ranges in cut(self._shard, shards)]
            self._pages = MappedPages(self._ipc, [one.memory for one in shards], cuts)
        except (ConfigError, OSError) as error:
            self.close()
            if self._said != str(error):
                LOG.warning(
                    "the GPU memory of the peer %s, on this machine, cannot be mapped (%s): its KV blocks come "
                    "through host memory, or over TCP.",
                    self._name,
                    error,
                )
            self._refused, self._said = time.monotonic(), str(error)
            return None
        threading.Thread(target=self._watch, args=(self._line,), name="quire-kv-ipc-watch", daemon=True).start()
        return self._pages

    def locate(self, keys: list[bytes]) -> list[tuple[int, int]]:
        """Ask the peer where blocks are. Raises the errors in `BROKEN`."""
        assert self._line is not None and self._pages is not None, "the connection is closed"
        self._line.send(Locate(keys))
        answer = self._line.receive(FROM_SHARE, READ_SECONDS)
        if not isinstance(answer, Located) or len(answer.places) != len(keys):
            raise ValueError("it does not say where its blocks are")
        if not all(self._pages.has(block) for block, _ in answer.places):
            raise ValueError("it has a block outside of its memory")
        return answer.places

    def close(self) -> None:
        """End the connection and the mapping; the next job begins anew."""
        if self._line is not None:
            self._line.close()
        if self._pages is not None:
            self._pages.close()
        self._line = self._pages = None

    def _watch(self, line: BlockLine) -> None:
        """Close what is mapped when the peer is gone, or when this rank's mover is. Keep the connection alive."""
        while True:
            try:
                self.ending.get(timeout=BEAT_SECONDS)
                ending = True
            except Empty:
                ending = False
            with self.lock:
                if self._line is not line:
                    return
                with suppress(*BROKEN):
                    if not ending:
                        self.locate([])
                        continue
                self.close()
                return
