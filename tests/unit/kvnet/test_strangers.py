"""Connections that prove no key, and peers that lie: neither keeps others from a share, nor grows a reader."""

import socket
import threading
from collections.abc import Iterator

import pytest

from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.contracts.step import Tier
from quire.kv.pool import BlockPool
from quire.kv.store import KVStore
from quire.kvnet import block_peers, block_share, share_server
from quire.kvnet.block_peers import BlockPeer
from quire.kvnet.block_share import BlockLine, Blocks, BlockShare, Shared
from quire.procs.host_link import connect, welcome

KEY, NAMESPACE = b"a key of both ends", b"the same model"
GROUP = KVGroup(
    block_size=4, layers=(0,), components=(KVComponent("k", num_heads=1, head_dim=1, dtype="uint8", item_bytes=1),)
)


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockShare]:
    monkeypatch.setattr(share_server, "MOST_LINES", 8)
    store = KVStore(BlockPool(4), KVGeometry(groups=(GROUP,)), num_host_blocks=8)
    share = BlockShare(("127.0.0.1", 0), KEY, NAMESPACE, store, ())
    yield share
    share.close()


def place(share: BlockShare) -> tuple[str, int]:
    host, port = share.server.listener.getsockname()[:2]
    return host, port


def peer(share: BlockShare) -> BlockLine:
    """A connection with a proof, that the share has welcomed."""
    line = BlockLine(connect(*place(share), KEY, NAMESPACE))
    assert isinstance(line.receive(block_share.FROM_SHARE), Shared)
    return line


def test_silent_strangers_lock_nobody_out(share: BlockShare) -> None:
    """The oldest is sent away for each new one; peers that have proved the key stay."""
    first = peer(share)
    strangers = [socket.create_connection(place(share)) for _ in range(50)]
    second = peer(share)
    assert len(share.server.strangers) + len(share.server.lines) <= 8
    for line in (first, second):
        line.send(block_share.Locate([bytes(32)]))
        assert line.receive(block_share.FROM_SHARE) == block_share.Located([(0, 0)])
    strangers[0].settimeout(20)
    while strangers[0].recv(1 << 16):
        pass  # its greeting, then the end
    for each in (*strangers, first, second):
        each.close()


def test_peers_are_not_sent_away_for_strangers(share: BlockShare) -> None:
    lines = [peer(share) for _ in range(8)]
    with socket.create_connection(place(share), timeout=20) as stranger:
        assert stranger.recv(1) == b""
    for line in lines:
        line.close()


class Liar:
    """A peer that names blocks: `count` in each message, with keys of `length` bytes, for ever."""

    def __init__(self, count: int, length: int) -> None:
        self._listener, self._closed = socket.create_server(("127.0.0.1", 0)), False
        self.place = self._listener.getsockname()[:2]
        self._count, self._length = count, length
        threading.Thread(target=self._lie, daemon=True).start()

    def _lie(self) -> None:
        number = 0
        while not self._closed:
            end, _ = self._listener.accept()
            try:
                welcome(end, KEY)
                line = BlockLine(end)
                line.send(Shared(()))
                while True:
                    keys = [(number + i).to_bytes(self._length, "little") for i in range(self._count)]
                    number += self._count
                    line.send(Blocks(keys, []))
            except OSError:
                end.close()

    def close(self) -> None:
        self._closed = True
        self._listener.close()


@pytest.mark.parametrize(
    ("count", "length", "words"),
    [
        (100, 32, "it names more than 1,000 blocks"),
        (1, 31, "keys of another length"),
        (1, 34, "keys of another length"),
        (1 << 18, 32, "a message of"),
    ],
)
def test_a_peer_that_names_blocks_without_end_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, count: int, length: int, words: str
) -> None:
    monkeypatch.setattr(block_peers, "MOST_KEYS", 1000)
    liar = Liar(count, length)
    one = BlockPeer(liar.place, KEY, NAMESPACE, Tier.PEER)
    most, update = 0, one._note

    def noted(message: Blocks) -> None:
        nonlocal most
        try:
            update(message)
        finally:
            most = max(most, len(one.keys))

    monkeypatch.setattr(one, "_note", noted)
    monkeypatch.setattr(one._closing, "wait", lambda pause: bool(pause))  # one connection
    one.follow()
    liar.close()
    assert words in caplog.text and most <= 1000 + count and not one.keys


def test_many_blocks_are_told_in_parts() -> None:
    changes = {number.to_bytes(32, "little"): number % 3 > 0 for number in range(3 * block_share.MOST_NAMED + 1)}
    parts = block_share._parts(changes)
    assert [len(part) for part in parts] == [block_share.MOST_NAMED] * 3 + [1]
    assert dict(pair for part in parts for pair in part) == changes
    assert block_share._parts({}) == [[]], "a sign of life"


def test_a_connection_follows_once(share: BlockShare) -> None:
    """Each following is a thread."""
    line = peer(share)
    with pytest.raises(block_share.BROKEN):
        for _ in range(50):
            line.send(block_share.Follow())
        while line.receive(block_share.FROM_SHARE):
            pass
    line.close()
    assert len(share._main.host.followers) <= 1


def test_claims_that_nobody_takes_are_bounded(share: BlockShare, monkeypatch: pytest.MonkeyPatch) -> None:
    """A core without requests takes none."""
    monkeypatch.setattr(block_share, "MOST_TOLD", 10)
    line = peer(share)
    for number in range(20):
        line.send(block_share.Claims([f"held {number}"], [f"ended {number}"]))
    line.send(block_share.Locate([]))
    line.receive(block_share.FROM_SHARE)
    line.close()
    assert share._told.qsize() == 10


def test_a_peer_that_dribbles_holds_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It proves the key, and then sends the rest byte by byte: it is never silent, and never done."""
    monkeypatch.setattr(block_peers, "READ_SECONDS", 0.2)
    monkeypatch.setattr(block_peers, "HELLO_SECONDS", 20.0)
    over = threading.Event()

    def dribble() -> None:
        end, _ = listener.accept()
        with end:
            welcome(end, KEY)
            end.sendall(block_share.LENGTH.pack(1 << 20))
            while not over.wait(0.01):
                end.sendall(b"\0")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()[:2]
        dribbles = threading.Thread(target=dribble, daemon=True)
        dribbles.start()
        asked = threading.Thread(target=_fails, args=((host, port), over), daemon=True)
        asked.start()
        asked.join(20)
        assert over.is_set(), "it still waits"
        dribbles.join(20)


def _fails(place: tuple[str, int], over: threading.Event) -> None:
    with pytest.raises(ConnectionError, match="too slow"):
        block_peers.open_peer(place, KEY, NAMESPACE)
    over.set()
