"""Blocks for other engines, over TCP: they hear which blocks there are, and read those of the host tier by key.

    hello        proof of the cluster's key (`host_link.py`), and a namespace: engines with another one are refused.
                 Checkpoints of states have a namespace of their own, and are read like blocks
    welcome      Shared, the layout of the pages of all ranks; or NotShared
    follow       Follow; then Blocks at once, at changes and each second; the other side answers each with Claims
    read         Read; then for each key a page header (crc32 of key and bytes, length; 0: no such block; number of the
                 block) and the bytes; without these where the reader takes them from memory that both hosts share
                 Blocks of KV groups that the reader's ranks divide in different ways have a Read each
    locate       Locate; then Located: the reader copies blocks from the device itself, and asks again when it has them.
                 It reads the pages of ranks on other hosts there, in the same way (`page_share.py`)

Messages are msgpack behind their length. Bytes are copied, and sent if the block still has the key then: nothing waits
for the engine's core, and the core waits for nothing here. A reader on this host copies them later: a block that was
overwritten meanwhile has another checksum. A block of the device has a number for each time that it comes. Where a
reader finds the same number before and after its copy, the block was there all the time: it loses its key before any
step may write it. Knows keys and ranges of pages. Never imports torch.
"""

import logging
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue

import msgspec

from quire.kv.pool import BlockPool
from quire.kv.store import KVStore
from quire.kvnet.share_server import BROKEN, ShareServer, shut
from quire.kvstore.shards import PageFiles, Range, Shard, packed_ranges
from quire.procs.host_link import NotMaster

LOG = logging.getLogger("quire").getChild("kv")
LENGTH, PAGE = struct.Struct("<I"), struct.Struct("<IQI")
MOST_BYTES = 1 << 23  # of a message: some 200,000 keys
MOST_NAMED = 8192  # keys in a message of `Blocks`
MOST_TOLD = 1 << 16  # claims that wait for the core, which takes none while it has no requests
BEAT_SECONDS, SILENT_SECONDS = 1.0, 5.0
TICK_SECONDS = 0.002
MOST_WAIT = 5.0  # for blocks that are on their way to the host tier


class Follow(msgspec.Struct, frozen=True, tag="follow"):
    """Tell me of your blocks in host memory, from now on; or of those on the `device`."""

    device: bool = False


class Locate(msgspec.Struct, frozen=True, tag="locate"):
    """Tell me where these blocks are on the device; or in the `host` memory, where some may come within `seconds`."""

    keys: list[bytes]
    host: bool = False
    seconds: float = 0.0


class Located(msgspec.Struct, frozen=True, tag="located"):
    """(number of the block, number of its coming) for each key; (0, 0): there is none."""

    places: list[tuple[int, int]]


class ReadPages(msgspec.Struct, frozen=True, tag="pages"):
    """Send me pages of the rank that you are, see `page_share.py`. Their keys are for the checksums.

    ranges, bare   as of `Read`
    """

    keys: list[bytes]
    blocks: list[int]
    ranges: tuple[Range, ...]
    bare: bool = False


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Send me these blocks.

    ranges    bytes of the pages of each block
    seconds   to wait for blocks that are still to come
    bare      leave the bytes out: I read them from memory
    """

    keys: list[bytes]
    ranges: tuple[Range, ...]
    seconds: float = 0.0
    bare: bool = False


class Shared(msgspec.Struct, frozen=True, tag="shared"):
    """The part of each block that each rank holds."""

    shards: tuple[Shard, ...]


class Claims(msgspec.Struct, frozen=True, tag="claims"):
    """Promised blocks: names of the leases to renew, and of those that have ended."""

    held: list[str]
    ended: list[str]


class Blocks(msgspec.Struct, frozen=True, tag="blocks"):
    """Blocks that came and went. Empty: a sign of life."""

    came: list[bytes]
    went: list[bytes]


class NotShared(msgspec.Struct, frozen=True, tag="not_shared"):
    """The end of the connection, and its reason."""

    why: str


TO_SHARE = msgspec.msgpack.Decoder(Follow | Read | Locate | Claims)
FROM_SHARE = msgspec.msgpack.Decoder(Shared | Blocks | Located | NotShared)
WRONG_SPACE = "it has another model, other weights, or another layout of its KV cache"


class BlockLine:
    """A connection for messages and pages. A thread may send while another one receives. Tests plant faults in it."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(SILENT_SECONDS)
        self._end = end

    @property
    def near(self) -> bool:
        """True when both ends are on this host."""
        return bool(self._end.getpeername()[0] == self._end.getsockname()[0])

    def send(self, message: msgspec.Struct) -> None:
        """Send a message."""
        data = msgspec.msgpack.encode(message)
        self._end.sendall(LENGTH.pack(len(data)) + data)

    def receive(
        self, decoder: msgspec.msgpack.Decoder[msgspec.Struct], seconds: float = float("inf")
    ) -> msgspec.Struct:
        """Return the next message. Raises `TimeoutError` after a silence, and other errors in `BROKEN`.

        seconds   most that the whole message may take, however it comes
        """
        head, until = bytearray(LENGTH.size), time.monotonic() + seconds
        self._fill(memoryview(head), until)
        if (length := LENGTH.unpack(head)[0]) > MOST_BYTES:
            raise msgspec.DecodeError(f"a message of {length} bytes")
        data = bytearray(length)
        self._fill(memoryview(data), until)
        return decoder.decode(data)

    def send_page(self, key: bytes, data: bytes | memoryview, block: int = 0, *, bare: bool = False) -> None:
        """Send the bytes of a block, or b"" when there is none. `bare`: only their header."""
        self._end.sendall(PAGE.pack(zlib.crc32(data, zlib.crc32(key)), len(data), block))
        if not bare:
            self._end.sendall(data)

    def receive_page(
        self, key: bytes, parts: Sequence[memoryview], until: float, read: Callable[[int], None] | None = None
    ) -> bool:
        """Receive a block into `parts`. Returns False when there is none, or when it is corrupt.

        until   latest time of its end, by time.monotonic
        read    fills `parts` with the bytes of a block by its number; None: they come over the connection
        """
        head = bytearray(PAGE.size)
        self._fill(memoryview(head), until)
        crc, length, block = PAGE.unpack(head)
        if length == 0:
            return False
        if length != (size := sum(map(len, parts))):
            raise msgspec.DecodeError(f"{length} bytes of a page, not {size}")
        if read is not None:
            read(block)
        found = zlib.crc32(key)
        for part in parts:
            if read is None:
                self._fill(part, until)
            found = zlib.crc32(part, found)
        return bool(crc == found)

    def end(self) -> None:
        """End the connection for the thread that waits for a message, which closes it."""
        shut(self._end)

    def close(self) -> None:
        """End the connection, and close the socket."""
        self.end()
        self._end.close()

    def _fill(self, view: memoryview, until: float = float("inf")) -> None:
        while view:
            if time.monotonic() > until:
                raise ConnectionError("too slow")  # it answers: only silence is a `TimeoutError`
            if not (count := self._end.recv_into(view)):
                raise ConnectionError("the connection has ended")
            view = view[count:]


class _ShownBlocks:
    """The blocks of a tier that others may read, and those who hear of their changes. The core calls it."""

    def __init__(self) -> None:
        self.places: dict[bytes, tuple[int, int]] = {}  # number of the block, and of its coming
        self.followers: tuple[SimpleQueue[tuple[bytes, bool]], ...] = ()  # not changed in place
        self._numbers = count(1)

    def came(self, block: int, key: bytes) -> None:
        """Hear of a block."""
        self.places[key] = block, next(self._numbers)
        for follower in self.followers:
            follower.put((key, True))

    def went(self, key: bytes, why: str) -> None:
        """Hear of the end of a block, before anything overwrites it."""
        if self.places.pop(key, None) is not None:
            for follower in self.followers:
                follower.put((key, False))


class _Space:
    """Blocks under a namespace: the parts that the ranks hold, those in host memory, and those of the device."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)
        self.host, self.device = _ShownBlocks(), _ShownBlocks()


class BlockShare:
    """Serves the blocks of a store's host tier, and says where those of the device are.

    place       host and port to listen on;  key  that the others must know
    namespace   what the others must have, too
    shards      the parts of a block that the ranks hold, in the order of the ranks
    device      pool of the device, if other processes can map its pages
    states      namespace and shards of checkpoints of states; None: no layer keeps states
    line        makes a connection from its socket
    """

    line: Callable[[socket.socket], BlockLine] = BlockLine

    def __init__(
        self,
        place: tuple[str, int],
        key: bytes,
        namespace: bytes,
        store: KVStore,
        shards: Sequence[Shard],
        *,
        device: BlockPool | None = None,
        states: tuple[bytes, Sequence[Shard]] | None = None,
    ) -> None:
        self._main = _Space(shards)
        self._spaces = {namespace: self._main}
        if states is not None and store.states is not None:
            space = self._spaces[states[0]] = _Space(states[1])
            store.states.host.on_publish.append(space.host.came)
            store.states.host.on_drop.append(space.host.went)
        self._told = store.sharing.told
        self._lock, self._said = threading.Lock(), ""  # guards followers; the last error of a read
        self.server = ShareServer(place, key, lambda end: self.line(end), self._serve)
        store.host.on_publish.append(self._main.host.came)
        store.host.on_drop.append(self._main.host.went)
        if device is not None:
            store.on_whole.append(self._main.device.came)
            device.on_drop.append(self._main.device.went)
        self.server.start()

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self.server.close()

    def _serve(self, line: BlockLine, namespace: bytes) -> None:
        """Serve a connection to its end."""
        if (space := self._spaces.get(namespace)) is None:
            line.send(NotShared(WRONG_SPACE))
            return
        line.send(Shared(space.shards))
        follows = False
        while not self.server.closed:
            message = line.receive(TO_SHARE)
            if isinstance(message, Read):
                try:
                    self._send(line, message, space)
                except BROKEN as error:
                    if str(error) != self._said:
                        LOG.warning("KV blocks could not be sent to another engine: %s", error)
                    self._said = str(error)
                    return
            elif isinstance(message, Locate):
                self._locate(line, message, space)
            elif isinstance(message, Claims):
                self._hear(message)
            elif isinstance(message, Follow):
                if follows:
                    raise NotMaster("it follows twice")
                follows, known = True, space.device if message.device else space.host
                threading.Thread(target=self._tell, args=(line, known), name="quire-kv-tell", daemon=True).start()

    def _locate(self, line: BlockLine, asked: Locate, space: _Space) -> None:
        known, until = space.host if asked.host else space.device, time.monotonic() + min(asked.seconds, MOST_WAIT)
        while any(key not in known.places for key in asked.keys) and time.monotonic() < until:
            time.sleep(TICK_SECONDS)
        line.send(Located([known.places.get(key, (0, 0)) for key in asked.keys]))

    def _hear(self, claims: Claims) -> None:
        """Tell the core what a peer claims, as far as there is room: what is held is claimed again each second."""
        told = [*((name, True) for name in claims.held), *((name, False) for name in claims.ended)]
        for one in told[: max(0, MOST_TOLD - self._told.qsize())]:
            self._told.put(one)

    def _send(self, line: BlockLine, asked: Read, space: _Space) -> None:
        until = time.monotonic() + min(asked.seconds, MOST_WAIT)
        ranges, size = packed_ranges(asked.ranges)
        with PageFiles() as files:
            files.open(space.shards, ranges)
            page = memoryview(bytearray(size))
            for key in asked.keys:
                while (found := space.host.places.get(key)) is None and time.monotonic() < until:
                    time.sleep(TICK_SECONDS)
                if found is not None:
                    files.read(found[0], page)
                whole = found is not None and space.host.places.get(key) is found  # else it was overwritten meanwhile
                line.send_page(key, page if whole else b"", found[0] if found else 0, bare=asked.bare)

    def _tell(self, line: BlockLine, known: _ShownBlocks) -> None:
        """Send the keys of all blocks of a tier, and then their changes."""
        changes = SimpleQueue[tuple[bytes, bool]]()
        with self._lock:
            known.followers += (changes,)
        latest = dict.fromkeys(list(known.places), True)  # after it is told of changes, so that none is missed
        try:
            while not self.server.closed:
                for some in _parts(latest):
                    line.send(Blocks([key for key, came in some if came], [key for key, came in some if not came]))
                latest = {}
                with suppress(Empty):
                    latest.update((changes.get(timeout=BEAT_SECONDS),))
                    latest.update(changes.get() for _ in range(changes.qsize()))
        except BROKEN:
            line.end()
        finally:
            with self._lock:
                known.followers = tuple(one for one in known.followers if one is not changes)


def _parts(changes: dict[bytes, bool]) -> list[list[tuple[bytes, bool]]]:
    """Return changes in parts that fit a message; one without changes if there are none."""
    every = list(changes.items())
    return [every[at : at + MOST_NAMED] for at in range(0, len(every), MOST_NAMED)] or [[]]
