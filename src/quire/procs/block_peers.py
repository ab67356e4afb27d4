"""Blocks of other engines, as a tier below host memory: known ahead, and read over TCP; see `block_share.py`.

A thread per peer follows which blocks the peer has, so a lookup asks nobody. A block that is gone, late or corrupt is a
failed copy. A peer that fails or is silent has no blocks until it is heard again. A promise names blocks that a peer is
about to have: they count as there until the request runs, and the peer keeps them until then.
"""

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from queue import SimpleQueue

from quire.contracts.errors import ConfigError, shown
from quire.contracts.request import Transfer
from quire.contracts.step import Tier
from quire.procs.block_share import BROKEN, FROM_SHARE, BlockLine, Blocks, Claims, Follow, NotShared, Read
from quire.procs.host_link import connect

LOG = logging.getLogger("quire").getChild("kv")
Place = tuple[str, int]
RETRY_SECONDS, REFUSED_SECONDS = 1.0, 30.0
HELLO_SECONDS = 2.0
READ_SECONDS = 8.0  # for all blocks of a job from a peer; those that are not there by then have failed
PROMISED_SECONDS = 2.0  # to wait for a promised block


class BlockPeer:
    """An engine that shares its blocks.

    keys   blocks that it has, as far as it has said
    held   names of its promises that are still needed
    """

    def __init__(self, place: Place, key: bytes, namespace: bytes) -> None:
        self.name = f"{place[0]}:{place[1]}"
        self.keys = set[bytes]()
        self.held: dict[str, None] = {}
        self.ended = SimpleQueue[str]()
        self._place, self._key, self._namespace = place, key, namespace
        self._closing = threading.Event()
        self._line: BlockLine | None = None  # that it is followed on

    def follow(self) -> None:
        """Follow which blocks it has, in a thread."""
        threading.Thread(target=self._run, name="quire-kv-peer", daemon=True).start()

    def read(self, keys: Sequence[bytes], pages: Sequence[memoryview], seconds: float) -> set[int]:
        """Read blocks into `pages`; return the indices of those that were read. `seconds`: see `Read`."""
        got, until = set[int](), time.monotonic() + READ_SECONDS
        try:
            with closing(self._open()) as line:
                line.send(Read(list(keys), seconds))
                for index, (key, page) in enumerate(zip(keys, pages, strict=True)):
                    if line.receive_page(key, page, until):
                        got.add(index)
        except (ConfigError, *BROKEN) as error:
            LOG.warning("KV blocks could not be read from the peer %s: %s", self.name, error)
            if self._line is not None:
                self._line.end()  # so it has no blocks until it is followed again
        return got

    def close(self) -> None:
        """Follow it no more."""
        self._closing.set()
        if self._line is not None:
            self._line.end()

    def _open(self) -> BlockLine:
        return BlockLine(connect(*self._place, self._key, self._namespace, seconds=HELLO_SECONDS))

    def _run(self) -> None:
        pause, said = 0.0, ""
        while not self._closing.wait(pause):
            pause = RETRY_SECONDS
            try:
                with closing(self._open()) as line:
                    self._line = line
                    line.send(Follow())
                    while isinstance(message := line.receive(FROM_SHARE), Blocks):
                        self.keys.difference_update(message.went)
                        self.keys.update(message.came)
                        line.send(Claims(list(self.held), [self.ended.get() for _ in range(self.ended.qsize())]))
                        said = ""
                    assert isinstance(message, NotShared)
                    raise ConfigError(f"the peer {self.name} refuses to share its KV blocks: {message.why}.")
            except (ConfigError, *BROKEN) as error:
                if str(error) != said and not self._closing.is_set():
                    LOG.warning("the peer %s shares no KV blocks: %s", self.name, error)
                said, pause = str(error), REFUSED_SECONDS if isinstance(error, ConfigError) else RETRY_SECONDS
            finally:
                self.keys = set()


class BlockPeers:
    """The peer tier: the core asks and promises, a thread of the mover reads. See `kv.store.KeyedTier`."""

    tier, takes = Tier.PEER, False

    def __init__(self, places: Iterable[Place], key: bytes, namespace: bytes) -> None:
        self._peers = [BlockPeer(place, key, namespace) for place in dict.fromkeys(places)]
        self._promises: dict[int, tuple[BlockPeer, str, list[bytes]]] = {}  # by request
        self._promised: dict[bytes, BlockPeer] = {}

    def follow(self) -> None:
        """Follow all peers."""
        for peer in self._peers:
            peer.follow()

    def has(self, key: bytes) -> bool:
        """True when a peer seems to have the block, or has promised it."""
        return key in self._promised or any(key in peer.keys for peer in self._peers)

    def note_written(self, keys: Iterable[bytes]) -> None:
        """See `KeyedTier`. No job writes to a peer."""

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget that peers have these blocks."""
        for key in keys:
            self._promised.pop(key, None)
            for peer in self._peers:
                peer.keys.discard(key)

    def clear(self) -> None:
        """Forget all blocks that peers have now."""
        self.discard(list(self._promised))
        for peer in self._peers:
            peer.keys = set()

    def expect(self, handle: int, transfer: Transfer, keys: list[bytes]) -> None:
        """Count on blocks that a peer has promised to a request, and make the peer keep them until `settle`."""
        peer = next((peer for peer in self._peers if peer.name == transfer.address), None)
        if peer is None:
            LOG.warning("a request names blocks at %s, which is no peer of this engine: it computes them. Add the "
                        "address to kv_peers.", shown(transfer.address))  # fmt: skip
            return
        self._promises[handle] = peer, transfer.name, keys
        self._promised.update(dict.fromkeys(keys, peer))
        peer.held[transfer.name] = None

    def settle(self, handle: int) -> None:
        """End the promise to a request, which runs or has ended."""
        if (promise := self._promises.pop(handle, None)) is not None:
            peer, name, keys = promise
            for key in keys:
                self._promised.pop(key, None)
            peer.held.pop(name, None)
            peer.ended.put(name)

    def fetch(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> tuple[int, ...]:
        """Read blocks; return the indices of those that failed."""
        failed, by_peer = set(range(len(keys))), dict[BlockPeer, list[int]]()
        for index, key in enumerate(keys):
            peer = self._promised.get(key) or next((one for one in self._peers if key in one.keys), None)
            if peer is not None:
                by_peer.setdefault(peer, []).append(index)
        for peer, some in by_peer.items():
            late = any(keys[index] in self._promised for index in some)
            got = peer.read([keys[index] for index in some], [pages[index] for index in some],
                            PROMISED_SECONDS if late else 0.0)  # fmt: skip
            failed -= {some[index] for index in got}
        return tuple(sorted(failed))

    def close(self) -> None:
        """Follow the peers no more."""
        for peer in self._peers:
            peer.close()
