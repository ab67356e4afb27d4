"""Memory that sleep frees: on a GPU by a driver that is made up here, on a CPU by giving pages back."""

import gc
import sys

import pytest
import torch

from quire.kernels import virtual_memory
from quire.kernels.virtual_memory import MappedRange
from quire.worker.regions import LEAST_BYTES, HostPages, MappedRegion

from ...support.fake_virtual_memory import LOST, FakeVirtualMemory

CPU = torch.device("cpu")
PAGE = FakeVirtualMemory.granularity


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> FakeVirtualMemory:
    monkeypatch.setattr(virtual_memory, "CHUNK_BYTES", 4 * PAGE)
    return FakeVirtualMemory()


def test_a_range_keeps_its_addresses_and_leaks_nothing(memory: FakeVirtualMemory) -> None:
    made = MappedRange(memory, 9 * PAGE + 1)
    assert made.size == 10 * PAGE and memory.used == 0
    made.back(PAGE)
    assert made.backed == 4 * PAGE, "a whole chunk"
    made.back()
    made.back()
    view, address = made.view(made.size), made.address
    assert view.data_ptr() == address and memory.used == made.size
    made.drop()
    made.drop()
    assert memory.used == made.backed == 0 and made.address == address
    made.back()
    del made
    gc.collect()
    assert memory.reserved, "the tensor keeps the range"
    assert view.unique().tolist() == [LOST]
    del view
    gc.collect()
    assert not (memory.reserved or memory.mapped or memory.physical)


def test_a_full_device_leaves_a_range_that_can_be_backed_later(memory: FakeVirtualMemory) -> None:
    made = MappedRange(memory, 8 * PAGE)
    memory.capacity = 6 * PAGE
    with pytest.raises(OSError, match="OUT_OF_MEMORY"):
        made.back()
    assert made.backed == memory.used == 4 * PAGE
    memory.capacity = 8 * PAGE
    made.back()
    assert made.backed == 8 * PAGE
    memory.map = lambda *given: (_ for _ in ()).throw(OSError("no"))  # type: ignore[method-assign]
    made.drop()
    with pytest.raises(OSError, match="no"):
        made.back()
    assert not memory.physical, "what could not be mapped is released"


def test_weights_move_once_then_sleep_and_wake_where_they_are(memory: FakeVirtualMemory) -> None:
    region = MappedRegion(memory, CPU)
    whole = torch.arange(LEAST_BYTES, dtype=torch.float32)
    first, second = whole[5:100], whole.view(2, -1)[1]
    other, small = torch.randn(3, LEAST_BYTES, dtype=torch.bfloat16), torch.ones(4)
    before = [one.clone() for one in (first, second, other)]
    at = small.data_ptr()
    region.adopt([first, second, other, small])
    assert small.data_ptr() == at and memory.used >= region.num_bytes > 0
    places = [one.data_ptr() for one in (first, second, other)]
    assert all(torch.equal(one, old) for one, old in zip((first, second, other), before, strict=True))
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    for _ in range(2):
        region.sleep(keep=True)
        assert memory.used == 0
        region.wake()
        assert [one.data_ptr() for one in (first, second, other)] == places
        assert all(torch.equal(one, old) for one, old in zip((first, second, other), before, strict=True))
    region.sleep(keep=False)
    region.wake()
    assert (other.view(torch.uint8) == LOST).all(), "dropped"


def test_a_device_that_others_filled_wakes_up_later_with_the_same_content(memory: FakeVirtualMemory) -> None:
    region = MappedRegion(memory, CPU)
    tensor = torch.randn(LEAST_BYTES)
    region.adopt([tensor])
    before, cache = tensor.clone(), region.empty((3, 5000), torch.int16, CPU)
    region.sleep(keep=True)
    memory.capacity = PAGE
    with pytest.raises(torch.OutOfMemoryError):
        region.wake()
    memory.capacity = 1 << 30
    region.wake()
    assert torch.equal(tensor, before)
    region.clear()
    assert not cache.any()


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux alone")
def test_pages_of_a_cpu_go_back_and_addresses_stay() -> None:
    region = HostPages()
    tensor, small = torch.ones(1 << 20), torch.ones(16)
    region.adopt([tensor, small])
    cache = region.empty((1 << 21,), torch.uint8, CPU)
    cache.fill_(7)
    at = tensor.data_ptr(), cache.data_ptr()
    region.sleep(keep=True)
    assert tensor.all() and cache.all(), "host memory is where they are"
    region.sleep(keep=False)
    region.wake()
    assert (tensor.data_ptr(), cache.data_ptr()) == at and small.all()
    assert not cache.any() and tensor.mean() < 0.01, "but for the ends in pages of others"
