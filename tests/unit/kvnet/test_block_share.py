"""Blocks over TCP and through memory: a reader gets the right page or none, and no fault of an end harms the other."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
import torch

from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.contracts.errors import ConfigError
from quire.contracts.request import Transfer
from quire.kernels.native import memory
from quire.kv.pool import BlockPool
from quire.kv.store import KVStore
from quire.kvnet import block_peers, block_share
from quire.kvnet.block_peers import BlockPeers, PeerPages
from quire.kvnet.block_share import BlockShare
from quire.kvstore.shards import PageFiles, Range, Shard

from ...support.addresses import free_port
from ...support.planted_faults import PAGE_FAULTS, PHASES, plant_lines

KEY, NAMESPACE, SIZE, RANKS = b"a key of both ends", b"the same model", 5_120, 2


def shard(heads: int, first: int = 0) -> Shard:
    """A part of a block of SIZE bytes with two heads."""
    part = KVComponent("kv", num_heads=heads, head_dim=SIZE // 16, dtype="float16", item_bytes=2)
    return Shard(geometry=KVGeometry(groups=(KVGroup(block_size=4, layers=(0,), components=(part,)),)), heads=(first,))


def name(number: int) -> bytes:
    return bytes([number, *range(31)])


def content(number: int) -> bytes:
    return bytes([number, 255 - number]) * (SIZE // 4) + bytes([number, 7]) * (SIZE // 4)


class Reader(BlockPeers):
    """The core's and the only rank's part of an engine that reads blocks."""

    def __init__(self, places: Any, key: bytes, namespace: bytes) -> None:
        super().__init__(places, key, namespace)
        self.pages = PeerPages(places, key, namespace, shard(2))


class Node:
    """A share over a host tier of eight blocks, of which each of two ranks holds a half."""

    def __init__(self, port: int = 0) -> None:
        self.store = KVStore(BlockPool(4), shard(2).geometry, num_host_blocks=8)
        self.memory, shards = list[Any](), list[Shard]()
        for rank in range(RANKS):
            pages, file = memory.shared((9, SIZE // RANKS), torch.uint8)
            shards.append(msgspec.structs.replace(shard(1, rank), file=file, token=bytes([rank, 99])))
            self.memory.append(pages)
            self.write(0, shards[-1].token, rank)
        self.share = BlockShare(("127.0.0.1", port or free_port()), KEY, NAMESPACE, self.store, shards)
        self.place = self.share.server.listener.getsockname()[:2]

    def write(self, block: int, data: bytes, rank: int) -> None:
        memoryview(self.memory[rank][block].numpy())[: len(data)] = data

    def put(self, *numbers: int) -> None:
        """Bring blocks to the host tier."""
        for number in numbers:
            (block,) = self.store.host.take(1)
            for rank in range(RANKS):
                self.write(block, content(number)[rank * SIZE // RANKS :][: SIZE // RANKS], rank)
            self.store.host.publish(block, name(number))
            self.store.host.release([block])

    def told(self) -> list[tuple[str, bool]]:
        queue = self.store.sharing.told
        return [queue.get() for _ in range(queue.qsize())]


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)


@pytest.fixture(autouse=True, params=["tcp", "memory"])
def quick(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.param == "tcp":
        monkeypatch.setattr(block_share.BlockLine, "near", False)
    monkeypatch.setattr(block_share, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(block_share, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(block_peers, "HELLO_SECONDS", 0.5)
    monkeypatch.setattr(block_peers, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(block_peers, "REFUSED_SECONDS", 0.02)
    monkeypatch.setattr(block_peers, "AVOID_SECONDS", 0.05)


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    with closing(node.share):
        yield node


@pytest.fixture
def follow(node: Node) -> Iterator[Any]:
    made = []

    def following(*places: Any, key: bytes = KEY, namespace: bytes = NAMESPACE) -> Reader:
        made.append(Reader(places or (node.place,), key, namespace))
        made[-1].follow()
        return made[-1]

    yield following
    for peers in made:
        peers.close()


def fetch(peers: Reader, *numbers: int) -> set[int]:
    """Read blocks, check the pages of those that came, and return the numbers of those that did not."""
    pages = [bytearray(SIZE) for _ in numbers]
    keys = [name(number) for number in numbers]
    failed = peers.pages.fetch(keys, peers.holders(keys), [memoryview(page) for page in pages])
    for index, number in enumerate(numbers):
        assert index in failed or bytes(pages[index]) == content(number), f"a wrong page of {number}"
    return {numbers[index] for index in failed}


def test_blocks_of_a_job_come_in_several_ways(node: Node, follow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_peers, "LEAST_BLOCKS", 2)
    node.put(1, 2, 3, 4, 5, 6, 7)
    peers, opened = follow(), []
    until(lambda: peers.has(name(7)))
    connect = peers.pages._open
    peers.pages._open = lambda place: opened.append(place) or connect(place)
    assert fetch(peers, 1, 2, 3, 9, 4, 5, 6, 7) == {9} and opened == [node.place] * block_peers.WAYS
    assert fetch(peers, 1, 2, 3) == set() and len(opened) == block_peers.WAYS + 1


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


@pytest.mark.parametrize("head", [0, 1])
def test_a_rank_with_half_of_the_heads_gets_these(node: Node, follow: Any, head: int) -> None:
    node.put(1, 2)
    follow()
    page = bytearray(SIZE // 2)
    pages = PeerPages([node.place], KEY, NAMESPACE, shard(1, head))
    assert pages.fetch([name(9), name(2)], [0, 0], [memoryview(bytearray(SIZE // 2)), memoryview(page)]) == (0,)
    assert page == content(2)[head * SIZE // 2 :][: SIZE // 2]


@pytest.mark.parametrize("fault", PAGE_FAULTS)
def test_a_fault_costs_blocks_and_nothing_else(
    node: Node, follow: Any, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    plant_lines(monkeypatch, f"page=ok/{fault}" + "/ok" * 50)
    node.put(1, 2, 3)
    peers = follow()
    until(lambda: peers.has(name(3)))
    failed = fetch(peers, 1, 2, 3)
    assert failed == {"slow": set(), "lost": {2}, "corrupt": {2}, "foreign": {2}}.get(fault, {2, 3})
    until(lambda: peers.has(name(3)) and fetch(peers, 1, 2, 3) == set())  # it is heard again


@pytest.mark.parametrize("phase", PHASES)
def test_a_share_that_is_lost_in_any_phase_costs_blocks_and_nothing_else(
    node: Node, follow: Any, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    plant_lines(monkeypatch, phase.replace("=", "=ok/ok/") + "/ok" * 50)
    node.put(1, 2, 3)
    peers = follow()
    for _ in range(3):
        fetch(peers, 1, 2, 3)
    until(lambda: peers.has(name(3)) and fetch(peers, 1, 2, 3) == set())
    until(lambda: len(node.share.server.lines) == 1)


def test_readers_that_are_lost_in_any_phase_harm_nobody(node: Node, follow: Any) -> None:
    node.put(1, 2)
    for length in (0, 3, 40, SIZE + 40):  # bytes that they read
        line = block_share.BlockLine(block_peers.connect(*node.place, KEY, NAMESPACE))
        if length:
            parts = Range(0, 0, SIZE // 2, 0), Range(1, 0, SIZE // 2, SIZE // 2)
            line.send(block_share.Read([name(1), name(2)], parts))
            line._fill(memoryview(bytearray(length)))
        line.close()
    peers = follow()
    until(lambda: peers.has(name(2)))
    assert fetch(peers, 1, 2) == set()
    until(lambda: len(node.share.server.lines) == 1)


def test_a_block_overwritten_while_it_is_copied_is_not_sent(
    node: Node, follow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.put(1, 2)
    peers = follow()
    until(lambda: peers.has(name(2)))
    read = PageFiles.read

    def overwritten(self: PageFiles, block: int, page: memoryview) -> None:
        if node.store.host.key(block) == name(1):
            node.store.host.forget([block])
            node.write(block, bytes(SIZE // 2), 1)
        read(self, block, page)

    monkeypatch.setattr(PageFiles, "read", overwritten)
    assert fetch(peers, 1, 2) == {1}


def test_a_block_overwritten_after_its_header_is_not_taken(
    node: Node, follow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.put(1, 2)
    peers, send = follow(), block_share.BlockLine.send_page
    until(lambda: peers.has(name(2)))

    def late(self: Any, key: bytes, data: Any, block: int, *, bare: bool) -> None:
        if key == name(1):
            node.write(block, bytes(9), 0)
        send(self, key, data, block, bare=bare)

    monkeypatch.setattr(block_share.BlockLine, "send_page", late)
    assert fetch(peers, 1, 2) == ({1} if block_share.BlockLine.near else set())


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
        assert fetch(peers, 1) == {1}
        until(lambda: not peers._peers[0].keys)


def test_frozen_peers_are_asked_together_and_only_once(
    node: Node, follow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_peers, "AVOID_SECONDS", 60.0)
    together, opened = threading.Barrier(2, timeout=20), list[Any]()

    def frozen(place: Any, **_: Any) -> Any:
        opened.append(place)
        together.wait()
        raise TimeoutError("timed out")

    node.put(3)
    places = [("10.0.0.1", 1), ("10.0.0.2", 1), node.place]
    pages = PeerPages(places, KEY, NAMESPACE, shard(2))
    answering, pages._open = pages._open, lambda place: (frozen if place[1] == 1 else answering)(place)  # type: ignore
    keys, room = [name(1), name(3), name(2)], [memoryview(bytearray(SIZE)) for _ in range(3)]
    for _ in range(2):
        assert pages.fetch(keys, [0, 2, 1], room) == (0, 2) and bytes(room[1]) == content(3)
    assert sorted(opened) == places[:2], "a peer that was silent is not asked again at once"


def test_a_read_that_ends_early_is_told_once(node: Node, follow: Any, caplog: pytest.LogCaptureFixture) -> None:
    def read(*ranges: Range) -> None:
        with closing(block_share.BlockLine(block_peers.connect(*node.place, KEY, NAMESPACE))) as line:
            line.receive(block_share.FROM_SHARE)
            line.send(block_share.Read([name(1)], ranges))
            with pytest.raises(ConnectionError):
                line.receive(block_share.FROM_SHARE)

    node.put(1)
    words = "KV blocks could not be sent to another engine: "
    for _ in range(2):
        read(Range(0, SIZE, SIZE, 0))
    assert caplog.text.count(f"{words}ranges outside of a page") == 1
    node.share._main.shards = tuple(msgspec.structs.replace(one, token=b"") for one in node.share._main.shards)
    read(Range(0, 0, SIZE // 2, 0))
    assert f"{words}{node.share._main.shards[0].file} is another file" in caplog.text


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"key": b"another key, as long"}, "has another key"),
        ({"namespace": b"another model"}, "refuses to share its KV blocks"),
    ],
)
def test_strangers_get_nothing(
    node: Node, follow: Any, caplog: pytest.LogCaptureFixture, other: dict[str, bytes], words: str
) -> None:
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
    lines = [block_share.BlockLine(block_peers.connect(*node.place, KEY, NAMESPACE)) for _ in range(2)]
    lines[0]._end.sendall(b"\xff\xff\xff\x7f" + bytes(50))
    lines[1].send(block_share.Read([name(1)], (Range(0, SIZE, SIZE, 0),)))
    lines[1].receive(block_share.FROM_SHARE)
    with pytest.raises(ConnectionError):
        lines[1].receive(block_share.FROM_SHARE)
    peers = follow()
    until(lambda: peers.has(name(1)))
    assert fetch(peers, 1) == set()
    for line in lines:
        line.close()


def test_memory_that_cannot_be_opened(
    node: Node, follow: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks come over TCP then, and a line says so."""
    node.put(1, 2)
    peers = follow()
    until(lambda: peers.has(name(2)))

    def refused(*_: Any) -> None:
        raise PermissionError("not for you")

    class Closed(PageFiles):
        open = refused  # type: ignore[assignment]

    monkeypatch.setattr(block_peers, "PageFiles", Closed)
    for _ in range(2):
        assert fetch(peers, 1, 2) == set()
    words = "on this host, cannot be opened (not for you): its KV blocks come over TCP"
    near = block_share.BlockLine.near is not False
    assert caplog.text.count(words) == near
    node.share._main.shards = tuple(
        msgspec.structs.replace(one, token=bytes([rank, 98])) for rank, one in enumerate(node.share._main.shards)
    )
    for rank, one in enumerate(node.share._main.shards):
        node.write(0, one.token, rank)
    assert fetch(peers, 1, 2) == set() and caplog.text.count(words) == 2 * near, "a peer that was started again"


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


def test_groups_that_ranks_divide_in_different_ways() -> None:
    """Each of two ranks has a head of group 0, and both have the only head of group 1, of twice the tokens."""

    def part(heads: int, *firsts: int) -> Shard:
        groups = tuple(
            KVGroup(block_size=size, layers=(layer,), components=(KVComponent("kv", count, SIZE // 16, "float16", 2),))
            for layer, (size, count) in enumerate(((4, heads), (8, 1)))
        )
        return Shard(geometry=KVGeometry(groups=groups), heads=firsts)

    store = KVStore(BlockPool(4), part(2, 0, 0).geometry, num_host_blocks=8)
    (first, second), kept, shards = store.host.take(2), list[Any](), list[Shard]()
    for rank in range(RANKS):
        pages, file = memory.shared((9, SIZE), torch.uint8)
        shards.append(msgspec.structs.replace(part(1, rank, 0), file=file, token=bytes([rank, 99])))
        half = content(1)[rank * SIZE // 2 :][: SIZE // 2]
        for block, data in ((0, shards[-1].token), (first, half), (second, content(2))):
            memoryview(pages[block].numpy())[: len(data)] = data
        kept.append(pages)
    share = BlockShare(("127.0.0.1", free_port()), KEY, NAMESPACE, store, shards)
    store.host.publish(first, name(1))
    store.host.publish(second, name(2) + b"\x01")
    try:
        reader = PeerPages([share.server.listener.getsockname()[:2]], KEY, NAMESPACE, part(2, 0, 0))
        keys, pages = [name(2) + b"\x01", name(1), name(2)], [bytearray(SIZE) for _ in range(3)]
        assert reader.fetch(keys, [0, 0, 0], list(map(memoryview, pages))) == (2,)
        assert pages[:2] == [content(2), content(1)]
    finally:
        share.close()
