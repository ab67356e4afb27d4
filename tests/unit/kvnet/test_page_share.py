"""Ranks on other hosts than their core serve their pages: a reader gets a whole page of all hosts, or none."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from quire.kvnet import block_peers, block_share
from quire.kvnet.block_share import BlockShare
from quire.kvnet.page_share import PageShare
from quire.kvstore.shards import PageFiles, Range

from ...support.planted_faults import plant_lines
from .test_block_share import KEY, NAMESPACE, RANKS, SIZE, Node, Reader, fetch, free_port, name, until


class HostedNode(Node):
    """A node whose ranks from number `first` on are on other hosts."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.share.close()
        shards, self.ranks = list(self.share._main.shards), list[PageShare]()
        for rank in range(first, RANKS):
            shards[rank] = msgspec.structs.replace(shards[rank], place=("127.0.0.1", free_port()))
            self.ranks.append(PageShare(shards[rank].place, KEY, {NAMESPACE: shards[rank]}))
        self.share = BlockShare(self.place, KEY, NAMESPACE, self.store, shards)

    def close(self) -> None:
        for share in (self.share, *self.ranks):
            (share.close if isinstance(share, BlockShare) else share.server.close)()


@pytest.fixture(params=[0, 1], ids=["all ranks elsewhere", "one rank elsewhere"])
def node(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostedNode]:
    monkeypatch.setattr(block_share, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(block_peers, "RETRY_SECONDS", 0.02)
    with closing(HostedNode(request.param)) as node:
        yield node


@pytest.fixture
def peers(node: HostedNode) -> Iterator[Reader]:
    node.put(1, 2, 3)
    with closing(Reader((node.place,), KEY, NAMESPACE)) as peers:
        peers.follow()
        until(lambda: peers.has(name(3)))
        yield peers


@pytest.mark.parametrize("near", [True, False])
def test_pages_come_from_all_hosts(peers: Reader, monkeypatch: pytest.MonkeyPatch, near: bool) -> None:
    monkeypatch.setattr(block_share.BlockLine, "near", near)
    assert fetch(peers, 3, 9, 1, 2) == {9}


def test_a_block_that_is_overwritten_while_it_is_read_is_not_taken(
    node: HostedNode, peers: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = PageFiles.read

    def overwritten(self: PageFiles, block: int, page: memoryview) -> None:
        read(self, block, page)
        if node.store.host.key(block) == name(1):  # both copies of the other rank's half may be the new ones
            node.store.host.forget([block])
            node.write(block, bytes(SIZE // RANKS), RANKS - 1)

    monkeypatch.setattr(PageFiles, "read", overwritten)
    assert fetch(peers, 1, 2) == {1}


@pytest.mark.parametrize("fault", ["lost", "corrupt", "killed"])
def test_a_fault_of_a_rank_costs_blocks_and_nothing_else(
    node: HostedNode, peers: Reader, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    plant_lines(monkeypatch, f"page=ok/{fault}" + "/ok" * 50)
    monkeypatch.setattr(PageShare, "line", staticmethod(BlockShare.line))
    monkeypatch.setattr(BlockShare, "line", staticmethod(block_share.BlockLine))
    assert fetch(peers, 1, 2, 3) == ({1, 2, 3} if fault == "killed" else {2})
    assert fetch(peers, 1, 2, 3) == set()


def test_a_host_that_is_gone_costs_its_blocks(node: HostedNode, peers: Reader) -> None:
    node.ranks[-1].server.close()
    assert fetch(peers, 1, 2) == {1, 2}
    assert peers.has(name(1)), "the core of the peer is there"


def test_another_engine_in_the_place_of_a_rank_is_not_read(
    node: HostedNode, peers: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    shares = node.ranks[-1]._shards
    node.ranks[-1]._shards = {key: msgspec.structs.replace(one, token=b"other") for key, one in shares.items()}
    assert fetch(peers, 1) == {1} and "another engine is at 127.0.0.1:" in caplog.text


def test_a_reader_gets_no_bytes_beside_the_pages(node: HostedNode) -> None:
    place: Any = node.ranks[-1]._shards[NAMESPACE].place
    for ranges in ([Range(1, 0, 8, 0)], [Range(0, SIZE, 8, 0)]):
        line, _ = block_peers.open_peer(place, KEY, NAMESPACE)
        with closing(line), pytest.raises(block_share.BROKEN):
            line.send(block_share.ReadPages([name(1)], [1], tuple(ranges)))
            line.receive(block_share.FROM_SHARE)
