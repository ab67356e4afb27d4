"""Blocks of the host tier for other engines, over TCP: they hear which blocks there are, and read them by key.

    hello        proof of the cluster's key (`host_link.py`), and a namespace: engines with another one are refused
    welcome      Shared, the layout of the pages of all ranks; or NotShared
    follow       Follow; then Blocks at once, at changes and each second; the other side answers each with Claims
    read         Read; then for each key a page header (crc32 of key and bytes, length; 0: no such block; number of the
                 block) and the bytes; without these where the reader takes them from memory that both hosts share

Messages are msgpack behind their length. Bytes are copied, and sent if the block still has the key then: nothing waits
for the engine's core, and the core waits for nothing here. A reader on this host copies them later: a block that was
overwritten meanwhile has another checksum. Knows keys and ranges of pages. Never imports torch.
"""

import logging
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from itertools import accumulate
from queue import Empty, SimpleQueue

import msgspec

from quire.contracts.errors import ConfigError
from quire.kv.store import KVStore
from quire.kvstore.shards import PageFiles, Range, Shard
from quire.procs.host_link import NotMaster, welcome

LOG = logging.getLogger("quire").getChild("kv")
LENGTH, PAGE = struct.Struct("<I"), struct.Struct("<IQI")
MOST_BYTES = 1 << 26  # of a message
MOST_LINES = 128  # connections at a time
BEAT_SECONDS, SILENT_SECONDS = 1.0, 5.0
TICK_SECONDS = 0.002
MOST_WAIT = 5.0  # for blocks that are on their way to the host tier


class Follow(msgspec.Struct, frozen=True, tag="follow"):
    """Tell me of your blocks, from now on."""


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


TO_SHARE = msgspec.msgpack.Decoder(Follow | Read | Claims)
FROM_SHARE = msgspec.msgpack.Decoder(Shared | Blocks | NotShared)
BROKEN = (OSError, NotMaster, ValueError)  # errors of a connection; a ValueError is a message that cannot be read


class BlockLine:
    """A connection for messages and pages. A thread may send while another one receives. Tests plant faults in it."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(SILENT_SECONDS)
        self._end = end

    @property
    def near(self) -> bool:
        """True when both ends are on this host."""
        return bool(self._end.getpeername()[0] == self._end.getsockname()[0])

    def send(self, message: Follow | Read | Shared | Claims | Blocks | NotShared) -> None:
        """Send a message."""
        data = msgspec.msgpack.encode(message)
        self._end.sendall(LENGTH.pack(len(data)) + data)

    def receive(self, decoder: msgspec.msgpack.Decoder[msgspec.Struct]) -> msgspec.Struct:
        """Return the next message. Raises `TimeoutError` after a silence, and other errors in `BROKEN`."""
        head = bytearray(LENGTH.size)
        self._fill(memoryview(head))
        if (length := LENGTH.unpack(head)[0]) > MOST_BYTES:
            raise msgspec.DecodeError(f"a message of {length} bytes")
        data = bytearray(length)
        self._fill(memoryview(data))
        return decoder.decode(data)

    def send_page(self, key: bytes, data: bytes | memoryview, block: int = 0, *, bare: bool = False) -> None:
        """Send the bytes of a block, or b"" when there is none. `bare`: only their header."""
        self._end.sendall(PAGE.pack(zlib.crc32(data, zlib.crc32(key)), len(data), block))
        if not bare:
            self._end.sendall(data)

    def receive_page(self, key: bytes, parts: Sequence[memoryview], until: float,
                     read: Callable[[int], None] | None = None) -> bool:  # fmt: skip
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
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

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


class BlockShare:
    """Serves the blocks of a store's host tier.

    place       host and port to listen on;  key  that the others must know
    namespace   what the others must have, too
    shards      the parts of a block that the ranks hold, in the order of the ranks
    line        makes a connection from its socket
    """

    line: Callable[[socket.socket], BlockLine] = BlockLine

    def __init__(self, place: tuple[str, int], key: bytes, namespace: bytes, store: KVStore,
                 shards: Sequence[Shard]) -> None:  # fmt: skip
        self._key, self._namespace, self._shards = key, namespace, tuple(shards)
        self._told = store.sharing.told
        self._blocks: dict[bytes, tuple[int]] = {}  # a tuple of its own for each time that the block came
        self._followers: tuple[SimpleQueue[tuple[bytes, bool]], ...] = ()  # not changed in place
        self._lines: set[BlockLine] = set()
        self._lock = threading.Lock()  # guards the two fields above
        self._closed, self._said = False, ""  # the second: the last error of a read
        try:
            self._listener = socket.create_server(place, family=socket.AF_INET6 if ":" in place[0] else socket.AF_INET)
        except OSError as error:
            raise ConfigError(f"kv_share={place[0]}:{place[1]}: this host cannot listen there: {error.strerror}. Give "
                              "an address of this host and a free port.") from None  # fmt: skip
        store.host.on_publish.append(lambda block, key: self._change(key, block))
        store.host.on_drop.append(lambda key, why: self._change(key, None))
        threading.Thread(target=self._accept, name="quire-kv-share", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for line in list(self._lines):
            line.end()

    def _change(self, key: bytes, block: int | None) -> None:
        if block is None:
            self._blocks.pop(key, None)
        else:
            self._blocks[key] = (block,)
        for follower in self._followers:
            follower.put((key, block is not None))

    def _accept(self) -> None:
        while not self._closed:
            try:
                end, _ = self._listener.accept()
            except OSError:  # too many open files, or closed
                time.sleep(0.05)
                continue
            if len(self._lines) < MOST_LINES:
                threading.Thread(target=self._serve, args=(end,), name="quire-kv-line", daemon=True).start()
            else:
                end.close()

    def _serve(self, end: socket.socket) -> None:
        """Serve a connection to its end."""
        line = self.line(end)
        with closing(line), suppress(*BROKEN):
            with self._lock:
                self._lines.add(line)
            try:
                same = welcome(end, self._key) == self._namespace
                end.settimeout(SILENT_SECONDS)
                if not same:
                    line.send(NotShared("it has another model, other weights, or another layout of its KV cache"))
                    return
                line.send(Shared(self._shards))
                while not self._closed:
                    message = line.receive(TO_SHARE)
                    if isinstance(message, Read):
                        try:
                            self._send(line, message)
                        except BROKEN as error:
                            if str(error) != self._said:
                                LOG.warning("KV blocks could not be sent to another engine: %s", error)
                            self._said = str(error)
                        return
                    if isinstance(message, Claims):
                        for name in message.held:
                            self._told.put((name, True))
                        for name in message.ended:
                            self._told.put((name, False))
                    else:
                        threading.Thread(target=self._tell, args=(line,), name="quire-kv-tell", daemon=True).start()
            finally:
                with self._lock:
                    self._lines.discard(line)

    def _send(self, line: BlockLine, asked: Read) -> None:
        until = time.monotonic() + min(asked.seconds, MOST_WAIT)
        starts = [*accumulate((one.length for one in asked.ranges), initial=0)]  # the bytes lie one behind the other
        ranges = [msgspec.structs.replace(one, target=at) for one, at in zip(asked.ranges, starts, strict=False)]
        with PageFiles() as files:
            files.open(self._shards, ranges)
            page = memoryview(bytearray(starts[-1]))
            for key in asked.keys:
                while (found := self._blocks.get(key)) is None and time.monotonic() < until:
                    time.sleep(TICK_SECONDS)
                if found is not None:
                    files.read(found[0], page)
                whole = found is not None and self._blocks.get(key) is found  # else it was overwritten meanwhile
                line.send_page(key, page if whole else b"", found[0] if found else 0, bare=asked.bare)

    def _tell(self, line: BlockLine) -> None:
        """Send the keys of all blocks, and then their changes."""
        changes = SimpleQueue[tuple[bytes, bool]]()
        with self._lock:
            self._followers += (changes,)
        latest = dict.fromkeys(list(self._blocks), True)  # after it is told of changes, so that none is missed
        try:
            while not self._closed:
                line.send(Blocks([key for key, came in latest.items() if came],
                                 [key for key, came in latest.items() if not came]))
                latest = {}
                with suppress(Empty):
                    latest.update((changes.get(timeout=BEAT_SECONDS),))
                    latest.update(changes.get() for _ in range(changes.qsize()))
        except BROKEN:
            line.end()
        finally:
            with self._lock:
                self._followers = tuple(one for one in self._followers if one is not changes)
