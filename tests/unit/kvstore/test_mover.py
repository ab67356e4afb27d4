"""Jobs of a rank: pages arrive whole, a disk does not hold up a step, and streams wait for the right work."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.contracts.step import CopyJob, FinishedCopy, Tier
from quire.kvstore import mover as module
from quire.kvstore.arena import KVArena
from quire.kvstore.files import BlockFiles
from quire.kvstore.mover import BlockMover
from quire.kvstore.page_copies import StreamCopies

from ...support.fake_streams import FakeStream, fake_streams

KEYS = tuple(bytes([i]) * 32 for i in range(4))


def arena() -> KVArena:
    component = KVComponent("k", num_heads=2, head_dim=8, dtype="float32", item_bytes=4)
    return KVArena(KVGeometry(block_size=4, groups=(KVGroup(layers=(0, 1), components=(component,)),)), 6,
                   torch.device("cpu"))  # fmt: skip


def job(number: int, source: Tier, target: Tier, sources: list[int], targets: list[int]) -> CopyJob:
    count = len(sources) or len(targets)
    return CopyJob(id=number, source=source, target=target, keys=KEYS[:count], sources=np.array(sources, np.int32),
                   targets=np.array(targets, np.int32))  # fmt: skip


def ended(mover: BlockMover) -> FinishedCopy:
    """Wait for a job."""
    for _ in range(2000):
        if reports := mover.finished(wait=True):
            (report,) = reports
            return report
    raise AssertionError("the job does not end")


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

    class Stream:
        priority_range = staticmethod(lambda: (0, -1))

        def __new__(cls, device: Any, priority: int = 0) -> Any:
            return FakeStream("load" if priority else "store", log)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    device, host = torch.arange(12, dtype=torch.uint8).view(3, 4), torch.zeros(3, 4, dtype=torch.uint8)
    copies = StreamCopies(device, host)
    stored, loaded = copies.copy([1], [2], to_host=True), copies.copy([2], [0], to_host=False)
    assert log == ["store waits for main", "in store", "event on store", "out of store",
                   "load waits for main", "in load", "event on load", "out of load"]
    assert host[2].tolist() == [4, 5, 6, 7] == device[0].tolist() and not stored() and not loaded() and len(events) == 2


def test_a_host_tier_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("cannot allocate")

    monkeypatch.setattr(module.memory, "empty", fails)
    with pytest.raises(module.ConfigError, match="kv_offload_gb: .* cannot be had"):
        BlockMover.__init__(BlockMover.__new__(BlockMover), _Sized(), 5)  # type: ignore[arg-type]


class _Sized:
    page_bytes = 1 << 20
