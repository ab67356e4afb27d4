"""Blocks copied from the device of a peer: a block that was not there before and after the copy is not used."""

import gc
import os
import signal as signals
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.contracts.step import CopyJob, Tier
from quire.kernels.mapped import MappedPages, export
from quire.kv.pool import BlockPool
from quire.kv.store import KVStore
from quire.kvnet import block_peers, block_share, device_peers
from quire.kvnet.block_peers import BlockPeers
from quire.kvnet.block_share import BlockShare
from quire.kvnet.device_peers import PeerDevices
from quire.kvstore.shards import Shard

from ...support import shared_ipc
from ...support.addresses import free_address
from ...support.planted_faults import PHASES, plant_lines
from ...support.shared_ipc import SharedIpc

KEY, NAMESPACE, SIZE, RANKS, BLOCKS = b"a key of both ends", b"the same model", 5_120, 2, 8
ROOT = Path(__file__).resolve().parents[3]


def shard(heads: int, first: int = 0) -> Shard:
    """A part of a block of SIZE bytes with two heads."""
    part = KVComponent("kv", num_heads=heads, head_dim=SIZE // 16, dtype="float16", item_bytes=2)
    return Shard(geometry=KVGeometry(groups=(KVGroup(block_size=4, layers=(0,), components=(part,)),)), heads=(first,))


def name(number: int) -> bytes:
    return bytes([number, *range(31)])


def content(number: int) -> bytes:
    return bytes([number, 255 - number]) * (SIZE // 4) + bytes([number, 7]) * (SIZE // 4)


class Node:
    """A share over a device of BLOCKS blocks, of which each of two ranks holds a half."""

    def __init__(self, port: int = 0) -> None:
        self.pool = BlockPool(BLOCKS)
        self.store = KVStore(self.pool, shard(2).geometry, num_host_blocks=2)
        self.memory, shards = list[Any](), list[Shard]()
        for rank in range(RANKS):
            self.memory.append(pages := shared_ipc.pages((BLOCKS + 1, SIZE // RANKS), torch.uint8))
            shards.append(msgspec.structs.replace(shard(1, rank), memory=export(SharedIpc(pages.device), pages)))
        self.place = ("127.0.0.1", port or int(free_address().rpartition(":")[2]))
        self.share = BlockShare(self.place, KEY, NAMESPACE, self.store, shards, device=self.pool)

    def put(self, *numbers: int) -> None:
        """Compute blocks. A block that must leave for them is overwritten."""
        for number in numbers:
            (block,) = self.pool.take(1)
            for rank in range(RANKS):
                half = content(number)[rank * SIZE // RANKS :][: SIZE // RANKS]
                memoryview(self.memory[rank][block].numpy())[:] = half
            self.pool.publish(block, name(number))
            self.pool.release([block])
            for tell in self.store.on_whole:
                tell(block, name(number))


class Reader:
    """The core's and the only rank's part of an engine that reads blocks."""

    def __init__(self, place: Any, key: bytes = KEY, namespace: bytes = NAMESPACE, part: Shard | None = None) -> None:
        self.part = part or shard(2)
        self.peers = BlockPeers([place], key, namespace, Tier.CUDA_IPC)
        memory = torch.zeros(BLOCKS + 1, self.part.geometry.page_bytes, dtype=torch.uint8)
        self.pages = memory.numpy()
        ipc = SharedIpc(torch.device("cpu"))
        self.devices = PeerDevices([place], key, namespace, self.part, ipc, memory)
        self.peers.follow()

    def fetch(self, *numbers: int) -> set[int]:
        """Read blocks, check the pages of those that came, and return the numbers of those that did not."""
        keys = tuple(map(name, numbers))
        targets = np.arange(len(keys), 0, -1, dtype=np.int32)
        job = CopyJob(
            id=0,
            source=Tier.CUDA_IPC,
            target=Tier.DEVICE,
            keys=keys,
            targets=targets,
            sources=np.array(self.peers.holders(keys), np.int32),
        )
        failed = self.devices.begin()(job, range(len(keys)))
        half = SIZE // 2 * self.part.heads[0]
        for index, number in enumerate(numbers):
            wanted = content(number)[half:][: self.pages.shape[1]]
            assert index in failed or bytes(self.pages[targets[index]]) == wanted, f"a wrong page of {number}"
        return {numbers[index] for index in failed}

    def close(self) -> None:
        self.peers.close()
        for link in self.devices._links:
            link.ending.put(None)


def until(true: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    shared_ipc.share_devices(monkeypatch)
    monkeypatch.setattr(block_share, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(block_share, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(device_peers, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(block_peers, "HELLO_SECONDS", 0.5)
    monkeypatch.setattr(block_peers, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(block_peers, "REFUSED_SECONDS", 0.02)
    monkeypatch.setattr(block_peers, "AVOID_SECONDS", 0.05)
    yield
    until(lambda: not SharedIpc.mapped)


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    with closing(node.share):
        yield node


@pytest.fixture
def reader(node: Node) -> Iterator[Reader]:
    node.put(1, 2, 3)
    with closing(Reader(node.place)) as reader:
        until(lambda: reader.peers.has(name(3)))
        yield reader


def once(act: Callable[[], Any]) -> None:
    """Act after the next copy, before the peer is asked again."""

    def acting() -> None:
        SharedIpc.on_copy.clear()
        act()

    SharedIpc.on_copy.append(acting)


def test_a_peer_is_named_and_a_silent_one_is_not_asked_again_at_once(
    node: Node, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reader.peers.holder(name(1)) == "{}:{}".format(*node.place) and reader.peers.holder(name(9)) == ""
    monkeypatch.setattr(block_peers, "AVOID_SECONDS", 60.0)
    asked = list[Any]()

    def silent() -> Any:
        asked.append(1)
        raise TimeoutError("timed out")

    monkeypatch.setattr(reader.devices._links[0], "_connect", silent)
    for _ in range(2):
        assert reader.fetch(1, 2) == {1, 2}
    assert len(asked) == 1


def test_blocks_are_known_ahead_and_their_memory_is_mapped_once(node: Node, reader: Reader) -> None:
    before = SharedIpc.num_copied
    assert reader.fetch(3, 1) == set() and len(SharedIpc.mapped) == RANKS
    mapped = set(SharedIpc.mapped)
    assert reader.fetch(2, 9) == {9} and set(SharedIpc.mapped) == mapped
    assert SharedIpc.num_copied == before + 3 * RANKS, "a half from each rank"
    node.put(*range(4, 12))
    until(lambda: reader.peers._peers[0].keys == set(map(name, range(4, 12))))
    node.pool.reset()
    until(lambda: not reader.peers._peers[0].keys)
    assert reader.fetch(4, 11) == {4, 11}


@pytest.mark.parametrize("head", [0, 1])
def test_a_rank_with_half_of_the_heads_gets_these(node: Node, head: int) -> None:
    node.put(1, 2)
    with closing(Reader(node.place, part=shard(1, head))) as reader:
        assert reader.fetch(2, 1) == set()
        assert len(SharedIpc.mapped) == 1


def test_a_block_that_left_during_the_copy_is_not_used(node: Node, reader: Reader) -> None:
    once(lambda: node.put(*range(4, 9)) or node.put(9))  # the last one takes the place of 1
    assert reader.fetch(1, 2) == {1}


def test_a_block_that_came_back_to_its_place_during_the_copy_is_not_used(node: Node, reader: Reader) -> None:
    place = node.pool.lookup(name(2))

    def moved() -> None:
        node.pool.forget([place])
        node.put(2)

    once(moved)
    assert reader.fetch(1, 2, 3) == {2}
    assert node.pool.lookup(name(2)) == place and reader.fetch(2) == set()


@pytest.mark.parametrize("phase", PHASES)
def test_a_share_that_is_lost_in_any_phase_costs_blocks_and_nothing_else(
    node: Node, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    plant_lines(monkeypatch, phase.replace("=", "=ok/ok/ok/") + "/ok" * 50)
    node.put(1, 2, 3)
    with closing(Reader(node.place)) as reader:
        for _ in range(4):
            reader.fetch(1, 2, 3)
        until(lambda: reader.peers.has(name(3)) and reader.fetch(1, 2, 3) == set())


def test_a_peer_that_ends_between_the_copy_and_its_confirmation(node: Node, reader: Reader) -> None:
    assert reader.fetch(1) == set()

    def ended() -> None:
        node.share.close()
        until(lambda: not node.share.server.lines)

    once(ended)
    assert reader.fetch(2, 3) == {2, 3} and not SharedIpc.mapped
    again = Node(node.place[1])
    with closing(again.share):
        again.put(3)
        until(lambda: reader.peers.has(name(3)))
        assert reader.fetch(3, 2) == {2}


def test_memory_is_not_mapped_for_longer_than_its_owner_lives(node: Node, reader: Reader) -> None:
    assert reader.fetch(1) == set() and SharedIpc.mapped
    node.share.close()
    until(lambda: not SharedIpc.mapped)


def test_a_mapping_ends_with_its_rank(node: Node) -> None:
    node.put(1)
    reader = Reader(node.place)
    assert reader.fetch(1) == set() and SharedIpc.mapped
    reader.peers.close()
    del reader.devices
    until(lambda: not SharedIpc.mapped)


def test_memory_that_cannot_be_mapped_is_said_once(
    node: Node, reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SharedIpc, "refused", "another user")
    monkeypatch.setattr(device_peers, "REFUSED_SECONDS", 0.0)
    for _ in range(3):
        assert reader.fetch(1, 2) == {1, 2}
    assert caplog.text.count("cannot be mapped (another user): its KV blocks come through host memory") == 1
    monkeypatch.setattr(SharedIpc, "refused", "")
    assert reader.fetch(1, 2) == set(), "it is tried again"


def test_a_peer_on_another_machine_is_read_in_another_way(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.share._main.shards = tuple(
        msgspec.structs.replace(one, memory=msgspec.structs.replace(one.memory, machine="another"))
        for one in node.share._main.shards
    )
    node.put(1)
    with closing(Reader(node.place)) as reader, closing(BlockPeers([node.place], KEY, NAMESPACE)) as host:
        host.follow()
        (block,) = node.store.host.take(1)
        node.store.host.publish(block, name(1))
        until(lambda: host.has(name(1)))
        assert not reader.peers.has(name(1)) and reader.fetch(1) == {1} and not SharedIpc.mapped


@pytest.mark.parametrize("other", [{"key": b"another key, as long"}, {"namespace": b"another model"}], ids=str)
def test_strangers_map_nothing(node: Node, other: dict[str, bytes]) -> None:
    node.put(1)
    with closing(Reader(node.place, **other)) as reader:
        assert reader.fetch(1) == {1} and not reader.peers.has(name(1)) and not SharedIpc.mapped


def test_a_place_outside_of_the_memory_is_not_read(node: Node, reader: Reader) -> None:
    node.share._main.device.places[name(2)] = BLOCKS + 1, 5
    before = SharedIpc.num_copied
    assert reader.fetch(1, 2) == {1, 2} and SharedIpc.num_copied == before


OWNER = """
import sys
from tests.unit.kvnet.test_device_peers import Node
node = Node()
node.put(1, 2)
print(node.place[1], flush=True)
sys.stdin.read()
"""


def lose(process: subprocess.Popen[str], signal: int) -> None:
    """Kill or stop a process, and wait until it has ended or stands."""
    process.send_signal(signal)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)


@pytest.mark.parametrize("signal", ["KILL", "STOP"])
def test_a_process_that_is_lost_between_the_copy_and_its_confirmation(signal: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as owner:
        try:
            assert owner.stdout is not None
            with closing(Reader(("127.0.0.1", int(owner.stdout.readline())))) as reader:
                until(lambda: reader.peers.has(name(2)))
                assert reader.fetch(1) == set()
                once(partial(lose, owner, getattr(signals, f"SIG{signal}")))
                assert reader.fetch(1, 2) == {1, 2} and not SharedIpc.mapped
        finally:
            owner.kill()


def test_jobs_of_one_peer_take_turns(node: Node, reader: Reader) -> None:
    node.put(4, 5)
    others = [
        threading.Thread(
            target=reader.devices.begin(),
            args=(
                CopyJob(
                    id=i,
                    source=Tier.CUDA_IPC,
                    target=Tier.DEVICE,
                    keys=(name(i),),
                    targets=np.array([i], np.int32),
                    sources=np.zeros(1, np.int32),
                ),
                (0,),
            ),
        )
        for i in (1, 2, 3, 4, 5)
    ]
    for one in others:
        one.start()
    for one in others:
        one.join(20)
    assert [bytes(reader.pages[i]) == content(i) for i in (1, 2, 3, 4, 5)] == [True] * 5


def test_memory_stays_until_a_copy_into_it_has_ended(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may end while a copy waits for its peer."""
    monkeypatch.setattr(block_share, "SILENT_SECONDS", 20.0)  # a collection of garbage may take a second
    node.put(1)
    begun, may, copy = threading.Event(), threading.Event(), SharedIpc.copy

    def gated(self: SharedIpc, moves: Any) -> None:
        begun.set()
        assert may.wait(20)
        copy(self, moves)

    monkeypatch.setattr(SharedIpc, "copy", gated)
    reader = Reader(node.place)
    memory = weakref.ref(reader.devices._pages)
    job = CopyJob(
        id=1,
        source=Tier.CUDA_IPC,
        target=Tier.DEVICE,
        keys=(name(1),),
        targets=np.array([1], np.int32),
        sources=np.zeros(1, np.int32),
    )
    found = list[Any]()
    thread = threading.Thread(target=lambda read: found.append(read(job, (0,))), args=(reader.devices.begin(),))
    thread.start()
    assert begun.wait(20)
    reader.close()
    del reader
    gc.collect()
    assert memory() is not None
    may.set()
    thread.join(20)
    assert found == [()]


def test_groups_that_ranks_divide_in_different_ways() -> None:
    """Each of two ranks has a half of a block of group 0; both have a whole block of group 1, and one is read."""
    ipc, memories = SharedIpc(torch.device("cpu")), list[Any]()
    kept = [shared_ipc.pages((BLOCKS + 1, SIZE), torch.uint8) for _ in range(RANKS)]
    for rank, pages in enumerate(kept):
        pages[3].fill_(10 + rank)
        memories.append(export(ipc, pages))
    cuts = [((0, 0, SIZE // 2, 0), (1, 0, SIZE // 2, SIZE // 2)), ((1, 0, SIZE, 0),)]
    mapped, page = MappedPages(ipc, memories, cuts), torch.zeros(SIZE, dtype=torch.uint8)
    for group, wanted in enumerate(({10: SIZE // 2, 11: SIZE // 2}, {11: SIZE})):
        ipc.copy(mapped.moves(3, page.data_ptr(), group))
        assert dict(zip(*(part.tolist() for part in page.unique(return_counts=True)), strict=True)) == wanted
    mapped.close()
