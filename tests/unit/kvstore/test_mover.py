"""Jobs of a rank: pages arrive whole, a disk does not hold up a step, and streams wait for the right work."""

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.contracts.step import CopyJob, DroppedFiles, FileNews, FinishedCopy, Tier
from quire.kernels import page_copies
from quire.kernels.native import memory
from quire.kernels.page_copies import StreamCopies
from quire.kvstore import mover as module
from quire.kvstore.arena import KVArena
from quire.kvstore.disk_tier import FileNames
from quire.kvstore.files import BlockFiles
from quire.kvstore.mover import BlockMover
from quire.kvstore.shards import PageFiles, Range, Shard
from quire.worker.copies import TierCopies

from ...support.fake_streams import FakeStream, fake_streams

KEYS = tuple(bytes([i]) * 32 for i in range(4))


def arena() -> KVArena:
    component = KVComponent("k", num_heads=2, head_dim=8, dtype="float32", item_bytes=4)
    return KVArena(
        KVGeometry(groups=(KVGroup(block_size=4, layers=(0, 1), components=(component,)),)), 6, torch.device("cpu")
    )


def job(number: int, source: Tier, target: Tier, sources: list[int], targets: list[int]) -> CopyJob:
    count = len(sources) or len(targets)
    return CopyJob(
        id=number,
        source=source,
        target=target,
        keys=KEYS[:count],
        sources=np.array(sources, np.int32),
        targets=np.array(targets, np.int32),
    )


def ended(mover: BlockMover) -> FinishedCopy:
    """Wait for a job."""
    for _ in range(2000):
        if reports := mover.finished(wait=True):
            (report,) = reports
            return report
    raise AssertionError("the job does not end")


def test_a_rank_on_another_host_tells_its_files_and_deletes_what_is_dropped(tmp_path: Path) -> None:
    device = arena()
    files = BlockFiles(tmp_path, bytes(32), "rank", page_bytes=device.page_bytes, most_bytes=1 << 20)
    files.write(KEYS[3], memoryview(bytearray(device.page_bytes)))
    copies = TierCopies(
        BlockMover(device, 5, files, names=FileNames(tmp_path, bytes(32), ["rank"], tells=True)), rank=7
    )
    assert copies.news(first=True) == (FileNews(rank=7, came=(KEYS[3],)),)
    copies.mover.begin([job(0, Tier.HOST, Tier.DISK, [1, 2], [])])
    assert ended(copies.mover).failed == ()
    (news,) = copies.news()
    assert set(news.came) == set(KEYS[:2]) and copies.news() == ()
    copies.mover.drop(DroppedFiles(keys=KEYS[1:]))
    copies.close()
    (news,) = copies.news()
    assert set(news.went) == {KEYS[1], KEYS[3]}
    assert [files.read(key, memoryview(bytearray(device.page_bytes))) for key in KEYS[:2]] == [True, False]
    assert TierCopies(BlockMover(device, 5, files)).news(first=True) == (), "the core reads the folder itself"


@pytest.mark.parametrize("numbers", [[1], [4, 2, 1]])
def test_pages_travel_to_a_disk_and_back(tmp_path: Path, numbers: list[int]) -> None:
    device, count = arena(), len(numbers)
    files = BlockFiles(tmp_path, bytes(32), "rank", page_bytes=device.page_bytes, most_bytes=1 << 20)
    mover = BlockMover(device, 5, files)
    device.pages[:] = torch.randint(0, 255, device.pages.shape, dtype=torch.uint8)
    before, places = device.pages.clone(), list(range(1, count + 1))
    mover.begin([job(0, Tier.DEVICE, Tier.HOST, numbers, places)])
    assert ended(mover).num_bytes == count * device.page_bytes
    mover.begin([job(1, Tier.HOST, Tier.DISK, places, [])])
    assert ended(mover).failed == ()
    mover.host.zero_()
    device.pages[numbers] = 0
    back = list(range(5, 5 - count, -1))
    mover.begin([job(2, Tier.DISK, Tier.HOST, [], back)])
    assert ended(mover).failed == ()
    mover.begin([job(3, Tier.HOST, Tier.DEVICE, back, numbers)])
    assert ended(mover).failed == () and torch.equal(device.pages, before)


def test_a_disk_that_hangs_holds_up_nothing_else(tmp_path: Path) -> None:
    device, gate = arena(), threading.Event()
    files = BlockFiles(tmp_path, bytes(32), "rank", page_bytes=device.page_bytes, most_bytes=1 << 20)
    files.read = lambda key, page: gate.wait(20) and False  # type: ignore[method-assign]
    mover = BlockMover(device, 5, files)
    mover.begin([job(0, Tier.DISK, Tier.HOST, [], [1, 2]), job(1, Tier.DEVICE, Tier.HOST, [1], [3])])
    assert ended(mover).id == 1 and mover.finished() == () and mover.finished(wait=True) == ()
    gate.set()
    assert ended(mover) == FinishedCopy(id=0, failed=(0, 1), seconds=pytest.approx(0, abs=60))


def test_streams_wait_for_the_steps_before_and_steps_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    side, log = fake_streams(monkeypatch)
    events: list[Any] = []

    class Event:
        def record(self, stream: FakeStream) -> None:
            log.append(f"event on {stream.name}")
            events.append(self)

        def query(self) -> bool:
            return False

    monkeypatch.setattr(torch.cuda, "Event", Event)

    names = iter(("store", "load"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(next(names), log))  # of the steps' priority
    device, host = torch.arange(12, dtype=torch.uint8).view(3, 4), torch.zeros(3, 4, dtype=torch.uint8)
    copies = StreamCopies(device, host)
    stored, loaded = copies.copy([1], [2], to_host=True), copies.copy([2], [0], to_host=False)
    assert log == [
        "store waits for main",
        "in store",
        "event on store",
        "out of store",
        "load waits for main",
        "in load",
        "event on load",
        "out of load",
    ]
    assert host[2].tolist() == [4, 5, 6, 7] == device[0].tolist() and not stored() and not loaded() and len(events) == 2


def test_several_threads_read_the_blocks_of_a_job(tmp_path: Path) -> None:
    """Each waits for the others; the blocks that failed are told in order."""
    device, together = arena(), threading.Barrier(3, timeout=20)
    files = BlockFiles(tmp_path, bytes(32), "rank", page_bytes=device.page_bytes, most_bytes=1 << 20)
    files.read = lambda key, page: together.wait() < 0  # type: ignore[method-assign]
    mover = BlockMover(device, 5, files)
    mover.begin([job(0, Tier.DISK, Tier.HOST, [], [3, 1, 2])])
    assert ended(mover).failed == (0, 1, 2)


def test_host_memory_is_shared_under_a_token() -> None:
    shared = Shard(geometry=arena().geometry, layer=5)
    mover = BlockMover(arena(), 5, shared=shared)
    (shard,) = mover.shards
    mover.host[2] = 7
    with PageFiles() as files:
        files.open(mover.shards, (Range(0, 0, 3, 0),))
        for block, expected in ((2, b"\7\7\7"), (0, shard.token[:3])):
            files.read(block, memoryview(found := bytearray(3)))
            assert found == expected
    assert shard.layer == 5 and len(shard.token) == 32 and not BlockMover(arena(), 5).shards


def test_a_peer_that_is_silent_holds_up_no_other_job() -> None:
    silent = threading.Event()

    class Peers:
        def fetch(self, keys: Any, sources: Any, pages: Any) -> tuple[int, ...]:
            return () if len(keys) > 1 else (0,) if silent.wait(20) else (1,)

    mover = BlockMover(arena(), 5, peers=Peers())
    mover.begin([job(0, Tier.PEER, Tier.HOST, [], [1]), job(1, Tier.PEER, Tier.HOST, [], [2, 3])])
    assert ended(mover).id == 1
    silent.set()
    assert ended(mover).failed == (0,)


def test_a_fault_of_a_file_thread_fails_the_job_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = arena()
    files = BlockFiles(tmp_path, bytes(32), "rank", page_bytes=device.page_bytes, most_bytes=1 << 20)
    files.read = lambda key, page: 1 // 0  # type: ignore[method-assign]
    mover = BlockMover(device, 5, files)
    mover.begin([job(0, Tier.DISK, Tier.HOST, [], [1, 2])])
    report = ended(mover)
    assert report.failed == (0, 1) and report.num_bytes == 0 and "ZeroDivisionError" in caplog.text


class Driver:
    """The calls of CUDA that lock host memory; `most` bytes can be locked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 1 << 40) -> None:
        self.locked: dict[int, int] = {}
        self.most, self.log = most, list[str]()
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.log.append(f"wait for {device}"))

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        if sum(self.locked.values()) + size > self.most:
            return 2
        self.locked[pointer] = size
        return 0

    def cudaHostUnregister(self, pointer: int) -> None:
        assert self.log, "a copy may still be running"
        del self.locked[pointer]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("page", [256, 4096 + 256, 3 * 65536])
def test_host_memory_is_locked_in_pieces_that_no_page_crosses(
    monkeypatch: pytest.MonkeyPatch, page: int, shared: bool
) -> None:
    driver = Driver(monkeypatch)
    monkeypatch.setattr(page_copies, "PIECE_BYTES", 1 << 20)
    size = (3 * (1 << 20) // page + 7, page)
    pages = memory.shared(size, torch.uint8)[0] if shared else memory.empty(size, torch.uint8)
    pages[3] = 9
    page_copies.pin(pages, torch.device("cuda", 1))
    at = pages.data_ptr()
    for pointer, size in driver.locked.items():
        assert pointer == at and at % 4096 == 0 and size % page == 0 and size < 4 << 20
        at += size
    assert at == pages.data_ptr() + pages.nbytes and len(driver.locked) > 1 and pages[3, 0] == 9
    del pages
    assert driver.log == ["wait for cuda:1"] and not driver.locked


def test_memory_that_cannot_be_locked_is_refused_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, most=3 << 20)
    monkeypatch.setattr(page_copies, "PIECE_BYTES", 1 << 20)
    pages = memory.empty((64, 1 << 16), torch.uint8)
    with pytest.raises(module.ConfigError, match="memory cannot be locked for the GPU .CUDA error 2.: lower"):
        page_copies.pin(pages, torch.device("cuda", 0))
    assert len(driver.locked) == 3
    del pages
    assert not driver.locked


def test_a_host_tier_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("cannot allocate")

    monkeypatch.setattr(module.memory, "empty", fails)
    with pytest.raises(module.ConfigError, match="kv_offload_gb: .* cannot be had"):
        BlockMover.__init__(BlockMover.__new__(BlockMover), _Sized(), 5)  # type: ignore[arg-type]


class _Sized:
    page_bytes = 1 << 20


def test_the_threads_of_a_mover_end_with_it(tmp_path: Path) -> None:
    device, before = arena(), set(threading.enumerate())
    files = BlockFiles(tmp_path, bytes(32), "rank", page_bytes=device.page_bytes, most_bytes=1 << 20)
    mover = BlockMover(device, 5, files)
    mover.begin([job(0, Tier.HOST, Tier.DISK, [1, 2], [])])
    assert ended(mover).failed == ()
    started = set(threading.enumerate()) - before
    assert {thread.name for thread in started} >= {"quire-kv-write"}
    del mover
    gc.collect()
    for thread in started:
        thread.join(20)
        assert not thread.is_alive()
