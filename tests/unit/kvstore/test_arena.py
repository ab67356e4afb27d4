"""The page layout: nothing overlaps, everything is aligned, a block is one contiguous piece."""

import pytest
import torch

from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.kernels.native import memory
from quire.kvstore.arena import KVArena

CPU = torch.device("cpu")
POISON = 0xA5


def group(layers=(0, 1, 2), dim: int = 24, dtype: str = "bfloat16", item: int = 2, size: int = 3) -> KVGroup:
    """K, V and one scale per head and token: sizes that are not multiples of the alignment."""
    k, v = (KVComponent(name, 2, dim, dtype, item) for name in "kv")
    parts = (k, v, KVComponent("s", 2, 1, "float32", 4))
    return KVGroup(layers=layers, components=parts, block_size=size)


def arena(num_blocks: int = 5, block_size: int = 3, **changes) -> KVArena:
    return KVArena(KVGeometry(groups=(group(size=block_size, **changes),)), num_blocks, CPU)


@pytest.mark.parametrize("dtype, item", [("bfloat16", 2), ("float32", 4), ("float8_e4m3fn", 1)])
def test_shapes_and_addresses(dtype, item):
    cache = arena(dtype=dtype, item=item)
    assert 5 * cache.page_bytes == cache.data.numel() and cache.pages.shape == (5, cache.page_bytes)
    for layer in (0, 1, 2):
        k, v, s = cache.views(layer)
        assert k.shape == v.shape == (5, 2, 3, 24) and s.shape == (5, 2, 3, 1)
        assert k.dtype == getattr(torch, dtype) and s.dtype == torch.float32
        for part, view in enumerate((k, v, s)):
            assert view.stride() == (cache.page_bytes // view.element_size(), 3 * view.shape[3], view.shape[3], 1)
            assert view.data_ptr() == cache.data.data_ptr() + cache._places[layer][part]
            for block in range(5):
                assert view[block].data_ptr() % 256 == 0


def test_writing_one_component_touches_nothing_else():
    cache = arena()
    every = [(layer, part, block) for layer in (0, 1, 2) for part in (0, 1, 2) for block in range(5)]
    seen = torch.zeros_like(cache.data, dtype=torch.int32)
    for layer, part, block in every:
        cache.data.fill_(POISON)
        view = cache.views(layer)[part]
        view[block] = 0
        touched = cache.data != POISON
        assert int(touched.sum()) == view[block].numel() * view.element_size()
        seen += touched
    assert int(seen.max()) == 1, "two components share bytes"


def test_views_share_the_memory_of_the_pages():
    cache = arena()
    cache.data.zero_()
    k, v, _ = cache.views(1)
    k[3, 1, 2] = torch.arange(24.0).bfloat16()
    at = cache._places[1][0] + (1 * 3 + 2) * 24 * 2
    assert torch.equal(cache.pages[3, at : at + 48].view(torch.bfloat16).float(), torch.arange(24.0))
    assert int(cache.pages[3].count_nonzero()) == int(cache.data.count_nonzero())


def test_the_padding_page_starts_as_zeros_in_used_memory(monkeypatch):
    def poisoned(shape, dtype, device):
        return torch.full(shape, POISON, dtype=dtype, device=device)

    monkeypatch.setattr(memory, "empty", poisoned)
    pages = arena().pages
    assert not pages[0].any() and bool((pages[1:] == POISON).all())


def test_offsets_beyond_32_bits():
    # 2.2 GiB are reserved; only the pages written here become resident.
    cache = arena(num_blocks=2600, block_size=1024, layers=(0, 1, 2, 3), dim=50, dtype="uint8", item=1)
    view = cache.views(3)[1]
    assert view.stride(0) * 2599 > 2**31
    view[2599, 1, 1023, 49] = 7
    last = cache.page_bytes * 2599 + cache._places[3][1] + view[0].numel() - 1
    assert int(cache.data[last]) == 7


def test_layers_are_named_by_the_model_not_by_position():
    cache = arena(layers=(7, 4))
    assert cache._places[7][0] == 0 < cache._places[4][0]
    with pytest.raises(KeyError):
        cache.views(0)


def test_groups_of_equal_pages_share_the_arena():
    geometry = KVGeometry(groups=(group((0, 2), size=4), group((1, 3), size=4)))
    cache = KVArena(geometry, 3, CPU)
    assert cache._places[0][0] == cache._places[1][0] == 0 and cache._places[2][0] == cache._places[3][0] > 0


def test_a_page_has_room_for_the_largest_group():
    cache = KVArena(KVGeometry(groups=(group((0, 1), size=4), group((2,), size=4))), 3, CPU)
    assert cache.page_bytes == 2560 and cache._places[2] == cache._places[0]
    assert {view.stride(0) * view.element_size() for layer in range(3) for view in cache.views(layer)} == {2560}
