"""Blocks of other engines, as a tier below host memory: known ahead, and read by each rank; see `block_share.py`.

    BlockPeers   of the engine core: a thread per peer follows which blocks the peer has, so a lookup asks nobody
    PeerPages    of each rank: reads this rank's part of blocks

A block that is gone, late or corrupt is a failed copy. A peer that is silent has no blocks until it is heard again. A
promise names blocks that a peer is about to have: they count as there until the request runs, and the peer keeps them
until then. A peer on this host is read through its memory, or over TCP where this process may not open that. Ranks of a
peer that are on other hosts than its core are read there. Blocks on GPUs of peers on this machine are a tier of their
own, which `device_peers.py` reads.
"""

import logging
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import msgspec

from quire.contracts.errors import ConfigError, shown
from quire.contracts.request import Transfer
from quire.contracts.step import Tier
from quire.kernels.mapped import mappable
from quire.kv.hashing import KEY_SIZES, group_of
from quire.kvnet.block_share import (
    FROM_SHARE,
    BlockLine,
    Blocks,
    Claims,
    Follow,
    Locate,
    Located,
    NotShared,
    Read,
    ReadPages,
    Shared,
)
from quire.kvnet.share_server import BROKEN
from quire.kvstore.file_threads import FileThreads
from quire.kvstore.shards import PageFiles, Range, Shard, cut
from quire.procs.host_link import NotMaster, connect

LOG = logging.getLogger("quire").getChild("kv")
Place = tuple[str, int]
RETRY_SECONDS, REFUSED_SECONDS = 1.0, 30.0
HELLO_SECONDS = 2.0
MOST_KEYS = 1 << 19  # blocks that a peer may name: 70 MB of this process
READ_SECONDS = 8.0  # for a peer's welcome, and for all blocks of a job; those that are not there by then have failed
AVOID_SECONDS = 5.0  # by then its silence is known, and it has no blocks until it is heard again
PROMISED_SECONDS = 2.0  # to wait for a promised block
WAYS, LEAST_BLOCKS = 4, 8  # a job divides its blocks among so many connections to a peer, at least so many blocks each:
# a page's copy and checksum keep a core busy, which makes 2 GB/s through shared memory


class BlockPeer:
    """An engine that shares its blocks.

    keys      blocks that it has, as far as it has said
    failed    blocks that could not be read from it -> time until which it counts as having none of them
    held      names of its promises that are still needed
    """

    def __init__(self, place: Place, key: bytes, namespace: bytes, tier: Tier, what: str = "KV blocks") -> None:
        self.name, self._tier, self._what = f"{place[0]}:{place[1]}", tier, what
        self.keys, self.failed = set[bytes](), dict[bytes, float]()
        self.held: dict[str, None] = {}
        self.ended = SimpleQueue[str]()
        self._open = partial(open_peer, place, key, namespace)
        self._closing = threading.Event()
        self._line: BlockLine | None = None  # that it is followed on

    def has(self, key: bytes) -> bool:
        """True when it seems to have the block."""
        return key in self.keys and self.failed.get(key, 0.0) <= time.monotonic()

    def fail(self, keys: Iterable[bytes]) -> None:
        """Count blocks as gone for a while. It tells what it drops: blocks that it then still has count again."""
        now = time.monotonic()
        self.failed = {key: until for key, until in self.failed.items() if until > now}
        self.failed.update((key, now + REFUSED_SECONDS) for key in keys if key in self.keys)

    def close(self) -> None:
        """Follow it no more."""
        self._closing.set()
        if self._line is not None:
            self._line.end()

    def follow(self) -> None:
        """Follow which blocks it has, until `close`."""
        pause, said = 0.0, ""
        while not self._closing.wait(pause):
            pause = RETRY_SECONDS
            try:
                line, shards = self._open()
                with closing(line):
                    self._line = line
                    if self._closing.is_set():
                        return
                    if (device := self._tier == Tier.CUDA_IPC) and not mappable(one.memory for one in shards):
                        pause = REFUSED_SECONDS
                        continue
                    line.send(Follow(device))
                    while isinstance(message := line.receive(FROM_SHARE), Blocks):
                        self._note(message)
                        line.send(Claims(list(self.held), [self.ended.get() for _ in range(self.ended.qsize())]))
                        said = ""
                    raise NotMaster("it does not say which blocks it has")
            except (ConfigError, *BROKEN) as error:
                if str(error) != said and self._tier == Tier.PEER and not self._closing.is_set():
                    LOG.warning("the peer %s shares no %s: %s", self.name, self._what, error)
                said, pause = str(error), REFUSED_SECONDS if isinstance(error, ConfigError) else RETRY_SECONDS
            finally:
                self.keys = set()

    def _note(self, message: Blocks) -> None:
        """Hear which blocks came and went. ConfigError for more blocks than an engine may name."""
        if any(len(key) not in KEY_SIZES for key in message.came):
            raise NotMaster("it names blocks by keys of another length")
        self.keys.difference_update(message.went)
        self.keys.update(message.came)
        if len(self.keys) > MOST_KEYS:
            raise ConfigError(f"it names more than {MOST_KEYS:,} blocks")


class BlockPeers:
    """Peers of an engine core: the tier of their host memory, or of their GPUs. See `KeyedTier` and `Promises`.

    what   blocks that are shared, in words
    """

    takes = False

    def __init__(
        self,
        places: Iterable[Place],
        key: bytes,
        namespace: bytes,
        tier: Tier = Tier.PEER,
        *,
        what: str = "KV blocks",
    ) -> None:
        self.tier = tier
        self._peers = [BlockPeer(place, key, namespace, tier, what) for place in dict.fromkeys(places)]
        self._promises: dict[int, tuple[BlockPeer, str, list[bytes]]] = {}  # by request
        self._promised: dict[bytes, BlockPeer] = {}

    def follow(self) -> None:
        """Follow all peers, in threads."""
        for peer in self._peers:
            threading.Thread(target=peer.follow, name="quire-kv-peer", daemon=True).start()

    def has(self, key: bytes) -> bool:
        """True when a peer seems to have the block, or has promised it."""
        return self._peer(key) is not None

    def note_written(self, keys: Iterable[bytes]) -> None:
        """See `KeyedTier`. No job writes to a peer."""

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget that peers have these blocks, until a peer could be read again."""
        gone = list(keys)
        for key in gone:
            self._promised.pop(key, None)
        for peer in self._peers:
            peer.fail(gone)

    def clear(self) -> None:
        """Forget all blocks that peers have now."""
        self.discard(list(self._promised))
        for peer in self._peers:
            peer.keys = set()

    def expect(self, handle: int, transfer: Transfer, keys: list[bytes]) -> None:
        """Count on blocks that a peer has promised to a request, and make the peer keep them until `settle`."""
        peer = next((peer for peer in self._peers if peer.name == transfer.address), None)
        if peer is None:
            LOG.warning(
                "a request names blocks at %s, which is no peer of this engine: it computes them. Add the "
                "address to kv_peers.",
                shown(transfer.address),
            )
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

    def holders(self, keys: Iterable[bytes]) -> list[int]:
        """Return the number of the peer that has, or has promised (~number), each block."""
        numbers: dict[BlockPeer | None, int] = {peer: number for number, peer in enumerate(self._peers)}
        found = ((key in self._promised, numbers.get(self._peer(key), 0)) for key in keys)
        return [~number if promised else number for promised, number in found]

    def holder(self, key: bytes) -> str:
        """Return the address of the peer that has, or has promised, a block; "" for none."""
        return "" if (peer := self._peer(key)) is None else peer.name

    def close(self) -> None:
        """Follow the peers no more."""
        for peer in self._peers:
            peer.close()

    def _peer(self, key: bytes) -> BlockPeer | None:
        return self._promised.get(key) or next((peer for peer in self._peers if peer.has(key)), None)


class PeerReads:
    """Reads blocks of peers from all of them at once, but not from one that was silent a moment ago. Any thread calls.

    places   in the order of `BlockPeers`;  memory  of the peers, in words
    ways     most threads that read from a peer for a job
    """

    def __init__(self, places: Iterable[Place], memory: str, ways: int = 1) -> None:
        self.places, self._memory, self._ways = list(dict.fromkeys(places)), memory, ways
        self._avoided = dict[int, float]()  # peers that did not answer in time -> time until which none is asked

    def read(self, sources: Sequence[int], read: Callable[[int, list[int]], Iterable[int]]) -> tuple[int, ...]:
        """Read blocks; return the indices of those that failed.

        sources   see `CopyJob`
        read      reads blocks from a peer by its number, and yields the indices of those that it has read
        """
        by_peer = dict[int, list[int]]()
        for index, source in enumerate(sources):
            by_peer.setdefault(max(source, ~source), []).append(index)
        asked = list[Future[tuple[int, ...]]]()
        try:
            for number, some in by_peer.items():
                ways = max(1, min(self._ways, len(some) // LEAST_BLOCKS))
                for way in range(ways):
                    asked.append(FileThreads("quire-kv-ask").submit(partial(self._ask, number, some[way::ways], read)))
        finally:
            wait(asked)  # no thread writes into pages that the caller has given back
        return tuple(sorted(index for one in asked for index in one.result()))

    def _ask(self, number: int, some: list[int], read: Callable[[int, list[int]], Iterable[int]]) -> tuple[int, ...]:
        """Read the blocks with the indices `some` from a peer; return the indices of those that failed."""
        failed = set(some)
        if self.avoids(number):
            return tuple(failed)
        try:
            for index in read(number, some):
                failed.discard(index)
        except (ConfigError, *BROKEN) as error:
            LOG.warning(
                "KV blocks could not be read from %s of the peer %s:%s: %s",
                self._memory,
                *self.places[number],
                str(error),
            )
            if isinstance(error, TimeoutError):
                self.avoid(number)
        return tuple(failed)

    def avoid(self, number: int) -> None:
        """Ask a peer nothing for a while, by its number: it has not answered in time."""
        self._avoided[number] = time.monotonic() + AVOID_SECONDS

    def avoids(self, number: int) -> bool:
        """True when a peer is to be asked nothing, by its number."""
        return self._avoided.get(number, 0.0) > time.monotonic()


class PeerPages:
    """Reads a rank's part of the blocks of peers. Threads of a mover call it.

    places   in the order of `BlockPeers`
    shard    the part of each block that this rank holds
    """

    def __init__(self, places: Iterable[Place], key: bytes, namespace: bytes, shard: Shard) -> None:
        self._reads, self._shard = PeerReads(places, "host memory", WAYS), shard
        self._open = partial(open_peer, key=key, namespace=namespace)
        self._far = set[tuple[Shard, ...]]()  # of peers on this host whose memory cannot be opened

    def fetch(self, keys: Sequence[bytes], sources: Sequence[int], pages: Sequence[memoryview]) -> tuple[int, ...]:
        """Read blocks; return the indices of those that failed. `sources`: see `CopyJob`."""
        return self._reads.read(sources, partial(self._read, keys, sources, pages))

    def _read(
        self, keys: Sequence[bytes], sources: Sequence[int], pages: Sequence[memoryview], number: int, some: list[int]
    ) -> Iterator[int]:
        """Read the blocks with the indices `some`; yield the index of each that was read."""
        place, until = self._reads.places[number], time.monotonic() + READ_SECONDS
        seconds = PROMISED_SECONDS if any(sources[index] < 0 for index in some) else 0.0
        line, shards = self._open(place)
        with closing(line):
            cuts, alike = cut(self._shard, shards), dict[tuple[Range, ...], list[int]]()
            for index in some:
                alike.setdefault(cuts[group_of(keys[index])], []).append(index)
            yield from alike.pop((), ())  # of groups that have no layer on this rank
            for ranges, own in alike.items():
                each = {index: (keys[index], pages[index]) for index in own}
                wanted = _WantedBlocks(each, ranges, seconds, until)
                apart = any(shards[one.rank].place for one in ranges)
                yield from (self._from_hosts if apart else self._from_core)(place, line, shards, wanted)

    def _from_core(
        self, place: Place, line: BlockLine, shards: tuple[Shard, ...], wanted: "_WantedBlocks"
    ) -> Iterator[int]:
        """Read blocks from the core of a peer; yield the index of each that was read."""
        with PageFiles() as files:
            near = self._opened(place, line, shards, wanted.ranges, files)
            line.send(Read(wanted.keys, wanted.ranges, wanted.seconds, bare=near))
            yield from wanted.receive(line, files if near else None)

    def _from_hosts(
        self, place: Place, line: BlockLine, shards: tuple[Shard, ...], wanted: "_WantedBlocks"
    ) -> Iterator[int]:
        """Read blocks from the hosts of a peer; yield the index of each that was there all the time."""
        before = _located(line, wanted)
        got = {index for index, at in before.items() if at[0]}
        for rank in dict.fromkeys(one.rank if shards[one.rank].place else -1 for one in wanted.ranges):
            own = tuple(one for one in wanted.ranges if (one.rank if shards[one.rank].place else -1) == rank)
            part = wanted.part(got, own)
            if rank < 0:
                got = set(self._from_core(place, line, shards, part))
            else:
                got = set(self._from_rank(shards[rank], part, [before[index][0] for index in part.each]))
        again = _located(line, wanted.part(got, ()))
        yield from (index for index in got if again[index] == before[index])

    def _from_rank(self, shard: Shard, wanted: "_WantedBlocks", blocks: list[int]) -> Iterator[int]:
        """Read blocks, by their numbers, from a rank on another host; yield the index of each that was read."""
        assert shard.place is not None
        line, theirs = self._open(shard.place)
        with closing(line), PageFiles() as files:
            if [one.token for one in theirs] != [shard.token]:
                raise NotMaster("another engine is at {}:{}, where a rank serves its part".format(*shard.place))
            own = wanted.part(wanted.each, tuple(msgspec.structs.replace(one, rank=0) for one in wanted.ranges))
            near = self._opened(shard.place, line, theirs, own.ranges, files)
            line.send(ReadPages(own.keys, blocks, own.ranges, bare=near))
            yield from own.receive(line, files if near else None)

    def _opened(
        self, place: Place, line: BlockLine, shards: tuple[Shard, ...], ranges: tuple[Range, ...], files: PageFiles
    ) -> bool:
        """Open the memory of a peer of this host in `files`. Returns False when its blocks come over TCP."""
        if not line.near or shards in self._far:
            return False
        try:
            files.open(shards, ranges)
        except OSError as error:
            self._far.add(shards)
            LOG.warning(
                "the memory of the peer %s:%s, on this host, cannot be opened (%s): its KV blocks come over TCP.",
                *place,
                str(error),
            )
            return False
        return True


class _WantedBlocks(NamedTuple):
    """Blocks of a job that are read in the same way.

    each      index in the job -> key, and the page to fill
    ranges    bytes of the pages of the peer's ranks
    seconds   to wait for blocks that are still to come
    until     latest time of the end, by time.monotonic
    """

    each: Mapping[int, tuple[bytes, memoryview]]
    ranges: tuple[Range, ...]
    seconds: float
    until: float

    @property
    def keys(self) -> list[bytes]:
        """The keys of the blocks."""
        return [key for key, _ in self.each.values()]

    def part(self, some: Container[int], ranges: tuple[Range, ...]) -> "_WantedBlocks":
        """Return some of the blocks, and other ranges. These blocks are there: they are not waited for."""
        each = {index: one for index, one in self.each.items() if index in some}
        return self._replace(each=each, ranges=ranges, seconds=0.0)

    def receive(self, line: BlockLine, files: PageFiles | None) -> Iterator[int]:
        """Receive the blocks in their order; yield the index of each that came whole.

        files   memory of the peer on this host, from which the bytes are read; None: they come over the connection
        """
        for index, (key, page) in self.each.items():
            read = partial(files.read, page=page) if files is not None else None
            if line.receive_page(key, [one.of(page) for one in self.ranges], self.until, read):
                yield index


def _located(line: BlockLine, wanted: _WantedBlocks) -> dict[int, tuple[int, int]]:
    """Return the numbers of blocks in the host memory of a peer, by their index in the job; see `Located`."""
    line.send(Locate(wanted.keys, True, wanted.seconds))
    answer = line.receive(FROM_SHARE, READ_SECONDS)
    if not isinstance(answer, Located) or len(answer.places) != len(wanted.each):
        raise NotMaster("it does not say where its blocks are")
    return dict(zip(wanted.each, answer.places, strict=True))


def open_peer(place: Place, key: bytes, namespace: bytes) -> tuple[BlockLine, tuple[Shard, ...]]:
    """Connect to a peer. Return the connection and the parts of a block that its ranks hold."""
    line = BlockLine(connect(*place, key, namespace, seconds=HELLO_SECONDS))
    try:
        if isinstance(message := line.receive(FROM_SHARE, READ_SECONDS), Shared):
            return line, message.shards
        why = message.why if isinstance(message, NotShared) else "it speaks another protocol"
        raise ConfigError(f"the peer {place[0]}:{place[1]} refuses to share its KV blocks: {why}.")
    except BaseException:
        line.close()
        raise
