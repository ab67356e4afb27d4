"""Blocks over TCP: who reads gets the right page or none, and no fault of an end harms the other one."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from quire.contracts.blocks import KVComponent, KVGroup
from quire.contracts.errors import ConfigError
from quire.contracts.request import Transfer
from quire.kv.pool import BlockPool
from quire.kv.store import KVStore
from quire.procs import block_peers, block_share
from quire.procs.block_peers import BlockPeers
from quire.procs.block_share import BlockShare

from ...support.planted_lines import PAGE_FAULTS, PHASES, plant

KEY, NAMESPACE, SIZE = b"a key of both ends", b"the same model", 5_000
GROUP = KVGroup(layers=(0,), components=(KVComponent("kv", num_heads=1, head_dim=1, dtype="float32", item_bytes=4),))


def name(number: int) -> bytes:
    return bytes([number, *range(31)])


def content(number: int) -> bytes:
    return bytes([number, 255 - number]) * (SIZE // 2)


class Node:
    """A share over a host tier of eight blocks, and the memory of these."""

    def __init__(self, port: int = 0) -> None:
        self.store = KVStore(BlockPool(4), (GROUP,), 4, num_host_blocks=8)
        self.memory = [bytearray(SIZE) for _ in range(9)]
        self.share = BlockShare(("127.0.0.1", port or free_port()), KEY, NAMESPACE, self.store, self.page)
        self.place = self.share._listener.getsockname()

    def page(self, block: int) -> memoryview:
        return memoryview(self.memory[block])

    def put(self, *numbers: int) -> None:
        """Bring blocks to the host tier."""
        for number in numbers:
            (block,) = self.store.host.take(1)
            self.memory[block][:] = content(number)
            self.store.host.publish(block, name(number))
            self.store.host.release([block])

    def told(self) -> list[tuple[str, bool]]:
        queue = self.store.sharing.told
        return [queue.get() for _ in range(queue.qsize())]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_share, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(block_share, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(block_peers, "HELLO_SECONDS", 0.5)
    monkeypatch.setattr(block_peers, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(block_peers, "REFUSED_SECONDS", 0.02)


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    with closing(node.share):
        yield node


@pytest.fixture
def follow(node: Node) -> Iterator[Any]:
    made = []

    def following(*places: Any, key: bytes = KEY, namespace: bytes = NAMESPACE) -> BlockPeers:
        made.append(BlockPeers(places or (node.place,), key, namespace))
        made[-1].follow()
        return made[-1]

    yield following
    for peers in made:
        peers.close()


def fetch(peers: BlockPeers, *numbers: int) -> set[int]:
    """Read blocks, check the pages of those that came, and return the numbers of those that did not."""
    pages = [bytearray(SIZE) for _ in numbers]
    failed = peers.fetch([name(number) for number in numbers], [memoryview(page) for page in pages])
    for index, number in enumerate(numbers):
        assert index in failed or bytes(pages[index]) == content(number), f"a wrong page of {number}"
    return {numbers[index] for index in failed}


def test_a_follower_knows_the_blocks_and_reads_them(node: Node, follow: Any) -> None:
    node.put(1, 2)
    peers = follow()
    until(lambda: peers.has(name(1)) and peers.has(name(2)))
    node.put(3)
    until(lambda: peers.has(name(3)))
    assert not peers.has(name(4)) and not peers.takes
    assert fetch(peers, 3, 1, 2) == set()
    assert fetch(peers, 4, 1) == {4}
    node.put(*range(4, 12))  # eight, so that 1, 2 and 3 go
    until(lambda: peers._peers[0].keys == set(map(name, range(4, 12))))
    node.store.host.reset()
    until(lambda: not peers._peers[0].keys)


@pytest.mark.parametrize("fault", PAGE_FAULTS)
def test_a_fault_costs_blocks_and_nothing_else(node: Node, follow: Any, monkeypatch: pytest.MonkeyPatch, fault: str
                                               ) -> None:  # fmt: skip
    plant(monkeypatch, f"page=ok/{fault}" + "/ok" * 50)
    node.put(1, 2, 3)
    peers = follow()
    until(lambda: peers.has(name(3)))
    failed = fetch(peers, 1, 2, 3)
    assert failed == {"slow": set(), "lost": {2}, "corrupt": {2}, "foreign": {2}}.get(fault, {2, 3})
    until(lambda: peers.has(name(3)))
    assert fetch(peers, 1, 2, 3) == set(), "it is heard again"


@pytest.mark.parametrize("phase", PHASES)
def test_a_share_that_is_lost_in_any_phase_costs_blocks_and_nothing_else(
        node: Node, follow: Any, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    plant(monkeypatch, phase.replace("=", "=ok/ok/") + "/ok" * 50)
    node.put(1, 2, 3)
    peers = follow()
    for _ in range(3):
        fetch(peers, 1, 2, 3)
    until(lambda: peers.has(name(3)) and fetch(peers, 1, 2, 3) == set())
    until(lambda: len(node.share._lines) == 1)


def test_readers_that_are_lost_in_any_phase_harm_nobody(node: Node, follow: Any) -> None:
    node.put(1, 2)
    for length in (0, 3, 40, SIZE + 40):  # bytes that they read
        line = block_share.BlockLine(block_peers.connect(*node.place, KEY, NAMESPACE))
        if length:
            line.send(block_share.Read([name(1), name(2)]))
            line._fill(memoryview(bytearray(length)))
        line.close()
    peers = follow()
    until(lambda: peers.has(name(2)))
    assert fetch(peers, 1, 2) == set()
    until(lambda: len(node.share._lines) == 1)


def test_a_peer_that_fails_has_no_blocks_until_it_is_heard(node: Node, follow: Any, monkeypatch: pytest.MonkeyPatch
                                                           ) -> None:  # fmt: skip
    monkeypatch.setattr(block_peers, "RETRY_SECONDS", 60.0)
    plant(monkeypatch, "page=short")
    node.put(1, 2)
    peers = follow()
    until(lambda: peers.has(name(2)))
    assert fetch(peers, 1) == {1}
    until(lambda: not peers.has(name(2)))


def test_a_block_that_is_overwritten_while_it_is_copied_is_not_sent(node: Node, follow: Any) -> None:
    node.put(1, 2)
    peers = follow()
    until(lambda: peers.has(name(2)))
    copy = node.page

    def page(block: int) -> memoryview:
        if node.store.host.key(block) == name(1):
            node.store.host.forget([block])
            node.memory[block][SIZE // 2 :] = bytes(SIZE - SIZE // 2)
        return copy(block)

    node.share._page = page
    assert fetch(peers, 1, 2) == {1}


def test_a_share_that_dies_and_one_that_comes_back(node: Node, follow: Any) -> None:
    node.put(1)
    peers = follow()
    until(lambda: peers.has(name(1)))
    node.share.close()
    assert fetch(peers, 1) == {1}
    until(lambda: not peers.has(name(1)))
    again = Node(node.place[1])
    with closing(again.share):
        again.put(1, 2)
        until(lambda: peers.has(name(2)))
        assert fetch(peers, 1, 2) == set()


def test_a_share_that_is_frozen(follow: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # connections wait in its queue for ever
        peers = follow(listener.getsockname())
        peers._promised[name(1)] = peers._peers[0]
        assert fetch(peers, 1) == {1} and not peers._peers[0].keys


@pytest.mark.parametrize(("other", "words"), [({"key": b"another key, as long"}, "has another key"),
                                              ({"namespace": b"another model"}, "refuses to share its KV blocks")])
def test_strangers_get_nothing(node: Node, follow: Any, caplog: pytest.LogCaptureFixture, other: dict[str, bytes],
                               words: str) -> None:  # fmt: skip
    node.put(1)
    peers = follow(**other)
    until(lambda: words in caplog.text)
    time.sleep(0.1)
    assert caplog.text.count(words) == 1 and not peers.has(name(1))
    peers._promised[name(1)] = peers._peers[0]
    assert fetch(peers, 1) == {1}


def test_nonsense_harms_nobody(node: Node, follow: Any) -> None:
    node.put(1)
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n" * 30, bytes(200)):
        with socket.create_connection(node.place) as stranger:
            stranger.sendall(words)
    line = block_share.BlockLine(block_peers.connect(*node.place, KEY, NAMESPACE))
    line._end.sendall(b"\xff\xff\xff\x7f" + bytes(50))
    peers = follow()
    until(lambda: peers.has(name(1)))
    assert fetch(peers, 1) == set()
    line.close()


def test_promises_are_waited_for_and_leases_renewed(node: Node, follow: Any) -> None:
    peers, address = follow(), f"{node.place[0]}:{node.place[1]}"
    peers.expect(7, Transfer(name="a", address="10.0.0.1:5", num_tokens=4), [name(9)])
    assert not peers.has(name(9)), "no peer of this engine"
    peers.expect(8, Transfer(name="b", address=address, num_tokens=4), [name(1)])
    assert peers.has(name(1))
    until(lambda: ("b", True) in node.told())
    threading.Timer(0.05, node.put, (1,)).start()
    assert fetch(peers, 1) == set(), "it was still to come"
    peers.settle(8)
    peers.settle(8)
    until(lambda: ("b", False) in node.told())
    assert not peers._promised


def test_a_reset_forgets_what_peers_have(node: Node, follow: Any) -> None:
    node.put(1)
    peers = follow()
    until(lambda: peers.has(name(1)))
    peers.clear()
    assert not peers.has(name(1))
    node.put(2)
    until(lambda: peers.has(name(2)))
    peers.discard([name(2)])
    assert not peers.has(name(2))


def test_a_port_that_is_taken(node: Node) -> None:
    with pytest.raises(ConfigError, match="cannot listen there"):
        Node(node.place[1])
