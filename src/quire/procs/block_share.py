"""Blocks of the host tier for other engines, over TCP: they hear which blocks there are, and read them by key.

    hello        proof of the cluster's key (`host_link.py`), and a namespace: engines with another one are refused
    follow       Follow; then Blocks at once, at changes and each second; the other side answers each with Claims
    read         Read; then for each key a page header (crc32 of key and page, length; 0: no such block) and the page

Messages are msgpack behind their length. A page is copied, and sent if its block still has the key then: nothing waits
for the engine's core, and the core waits for nothing here. Knows keys and pages as bytes. Never imports torch.
"""

import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import closing, suppress
from queue import Empty, SimpleQueue

import msgspec

from quire.contracts.errors import ConfigError
from quire.kv.store import KVStore
from quire.procs.host_link import NotMaster, welcome

LENGTH, PAGE = struct.Struct("<I"), struct.Struct("<IQ")
MOST_BYTES = 1 << 26  # of a message
MOST_LINES = 128  # connections at a time
BEAT_SECONDS, SILENT_SECONDS = 1.0, 5.0
TICK_SECONDS = 0.002
MOST_WAIT = 5.0  # for blocks that are on their way to the host tier


class Follow(msgspec.Struct, frozen=True, tag="follow"):
    """Tell me of your blocks, from now on."""


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Send me these blocks. `seconds`: to wait for blocks that are still to come."""

    keys: list[bytes]
    seconds: float = 0.0


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
FROM_SHARE = msgspec.msgpack.Decoder(Blocks | NotShared)
BROKEN = (OSError, NotMaster, msgspec.DecodeError)  # errors of a connection


class BlockLine:
    """A connection for messages and pages. A thread may send while another one receives. Tests plant faults in it."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(SILENT_SECONDS)
        self._end = end

    def send(self, message: Follow | Read | Claims | Blocks | NotShared) -> None:
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

    def send_page(self, key: bytes, page: bytes) -> None:
        """Send a block, or b"" when there is none."""
        self._end.sendall(PAGE.pack(zlib.crc32(page, zlib.crc32(key)), len(page)))
        self._end.sendall(page)

    def receive_page(self, key: bytes, page: memoryview, until: float) -> bool:
        """Receive a block into `page`. Returns False when there is none, or when it is corrupt.

        until   latest time of its end, by time.monotonic
        """
        head = bytearray(PAGE.size)
        self._fill(memoryview(head), until)
        crc, length = PAGE.unpack(head)
        if length not in (0, len(page)):
            raise msgspec.DecodeError(f"a page of {length} bytes, not {len(page)}")
        self._fill(page[:length], until)
        return bool(length) and crc == zlib.crc32(page, zlib.crc32(key))

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
                raise TimeoutError("too slow")
            if not (count := self._end.recv_into(view)):
                raise ConnectionError("the connection has ended")
            view = view[count:]


class BlockShare:
    """Serves the blocks of a store's host tier.

    place       host and port to listen on;  key  that the others must know
    namespace   what the others must have, too
    page        returns the memory of a host block
    line        makes a connection from its socket
    """

    line: Callable[[socket.socket], BlockLine] = BlockLine

    def __init__(self, place: tuple[str, int], key: bytes, namespace: bytes, store: KVStore,
                 page: Callable[[int], memoryview]) -> None:  # fmt: skip
        self._key, self._namespace, self._page = key, namespace, page
        self._told = store.sharing.told
        self._blocks: dict[bytes, tuple[int]] = {}  # a tuple of its own for each time that the block came
        self._followers: tuple[SimpleQueue[tuple[bytes, bool]], ...] = ()  # not changed in place
        self._lines: set[BlockLine] = set()
        self._lock = threading.Lock()  # guards the two fields above
        self._closed = False
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
                while not self._closed:
                    message = line.receive(TO_SHARE)
                    if isinstance(message, Read):
                        self._send(line, message)
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
        for key in asked.keys:
            while (found := self._blocks.get(key)) is None and time.monotonic() < until:
                time.sleep(TICK_SECONDS)
            page = b"" if found is None else bytes(self._page(found[0]))
            line.send_page(key, page if self._blocks.get(key) is found else b"")  # else it was overwritten meanwhile

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
