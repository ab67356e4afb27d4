"""Pages of ranks that are put together from pages of ranks of another number: every byte is the model's, or none is."""

import os
from itertools import product

import msgspec
import pytest
import torch

from quire.args.checkpoint import parse_checkpoint_config
from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Parallel
from quire.kernels.native import memory
from quire.kvstore.shards import PageFiles, Range, Shard, cut, place_layers
from quire.plan.kv_geometry import rank_geometry
from quire.plan.meeting_rows.records import Inputs
from quire.plan.meetings import check, met
from quire.plan.placement import kv_heads, ranks

from ...support.tiny_models import Tiny, tiny_config

BLOCKS = 3
LAYOUTS = {"tp1": (1, 1), "tp2": (2, 1), "tp4": (4, 1), "pp2": (1, 2), "pp3": (1, 3), "tp2-pp2": (2, 2)}
MODELS = {
    "heads": tiny_config(Tiny(family="qwen3", heads=(8, 4)), num_hidden_layers=5),
    "few-heads": tiny_config(Tiny(family="qwen3", heads=(8, 2)), num_hidden_layers=5),
    "latents": tiny_config(Tiny(family="deepseek_v3", heads=(4, 4)), num_hidden_layers=5),
}


def content(layer: int, name: str, head: int, block: int, size: int) -> bytes:
    """Return bytes that only this head of this layer has."""
    seed = torch.Generator().manual_seed(hash((layer, len(name), ord(name[0]), head, block)) % (1 << 31))
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=seed).numpy().tobytes()


def pieces(shard: Shard, block: int) -> list[tuple[int, bytes]]:
    """Return offset and content of every head of a page."""
    geometry, found = shard.geometry, []
    for layer, starts in place_layers(geometry).items():
        for part, start in zip(geometry.groups[0].of(layer), starts, strict=True):
            size = geometry.block_size * part.head_dim * part.item_bytes
            for head in range(part.num_heads):
                found.append(
                    (start + head * size, content(shard.layer + layer, part.name, shard.head + head, block, size))
                )
    return found


def engine(model: str, layout: str, *, dtype: str = "float32") -> tuple[list[Shard], list[torch.Tensor]]:
    """Return the shards of an engine, and the memory of its ranks with the content of all blocks."""
    args, (tp, pp) = parse_checkpoint_config(MODELS[model]), LAYOUTS[layout]
    parallel, shards, kept = Parallel(tp=tp, pp=pp), [], []
    check(met(Inputs(args=args, parallel=parallel)))
    for rank in ranks(args, parallel):
        geometry = rank_geometry(args, rank, dtype=dtype, device="cpu", block_size=4)
        ((first, _),) = kv_heads(args, rank)
        pages, file = memory.shared((BLOCKS, geometry.page_bytes), torch.uint8)
        shard = Shard(geometry=geometry, layer=rank.layers[0], head=first, file=file, token=b"right")
        for block in range(1, BLOCKS):
            for start, data in pieces(shard, block):
                memoryview(pages[block].numpy())[start : start + len(data)] = data
        memoryview(pages[0].numpy())[:5] = shard.token
        kept.append(pages)
        shards.append(shard)
    return shards, kept


@pytest.mark.parametrize("model", MODELS)
def test_every_layout_reads_every_other(model: str) -> None:
    engines = {layout: engine(model, layout) for layout in LAYOUTS}
    for (name, (mine, _)), (other, (theirs, _)) in product(engines.items(), engines.items()):
        for shard in mine:
            ranges = cut(shard, tuple(theirs))
            page = bytearray(shard.geometry.page_bytes)
            with PageFiles() as files:
                files.open(theirs, ranges)
                files.read(2, memoryview(page))
            for start, data in pieces(shard, 2):
                assert page[start : start + len(data)] == data, f"{name} from {other}"
            assert name != other or len(ranges) == 1


def test_a_rank_reads_its_own_heads_alone() -> None:
    (whole,), _ = engine("heads", "tp1")
    for shard in engine("heads", "tp2")[0]:
        size = shard.geometry.page_bytes
        assert sum(one.length for one in cut(shard, (whole,))) == size == whole.geometry.page_bytes / 2
    (whole,), _ = engine("latents", "tp1")
    page = Range(0, 0, whole.geometry.page_bytes, 0)
    assert all(cut(shard, (whole,)) == (page,) for shard in engine("latents", "tp4")[0])


def test_a_quantized_cache_is_cut_like_another_one() -> None:
    (whole,), _ = engine("heads", "tp1", dtype="float8_e4m3fn")
    shard = engine("heads", "tp4", dtype="float8_e4m3fn")[0][3]
    assert {one.length for one in cut(shard, (whole,))} == {4 * shard.geometry.groups[0].components[0].head_dim}


def test_what_no_rank_holds_is_refused() -> None:
    shards, _ = engine("heads", "tp2")
    with pytest.raises(ConfigError, match="none of its ranks has head 2 of layer 0: use the same -tp"):
        cut(engine("heads", "tp1")[0][0], (shards[0],))
    parts = KVComponent("k", 2, 8, "float32", 4), KVComponent("k", 1, 8, "float32", 4)
    both, halves = (
        [KVGroup(layers=own, components=(part,), block_size=4) for own in ((0, 1), layers)]
        for part, layers in zip(parts, ((2, 3), (3, 2)), strict=True)
    )
    with pytest.raises(ConfigError, match="KV groups are divided in another way"):
        cut(
            Shard(geometry=KVGeometry(groups=tuple(halves))),
            (Shard(geometry=KVGeometry(groups=tuple(both))),),
        )


def test_another_file_is_not_read() -> None:
    shards, _ = engine("heads", "tp2")
    ranges, before = (Range(1, 0, 8, 0),), len(os.listdir("/proc/self/fd"))
    for changes in ({"token": b"wrong"}, {"token": b""}, {"file": "/proc/1"}):
        wrong = msgspec.structs.replace(shards[1], **changes)
        with pytest.raises(OSError, match="is another file|Permission|directory"), PageFiles() as files:
            files.open([shards[0], wrong], ranges)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("wrong", [(2, 0, 8, 0), (-1, 0, 8, 0), (0, -8, 8, 0), (0, 0, 0, 0), (0, 1, 9_999_999, 0)])
def test_ranges_of_a_stranger(wrong: tuple[int, int, int, int]) -> None:
    shards, _ = engine("heads", "tp2")
    whole = Range(0, 0, shards[0].geometry.page_bytes, 0)
    with PageFiles() as files:
        files.open(shards, (whole, whole))
        for ranges in ((Range(*wrong),), (whole, whole, whole)):
            with pytest.raises(ValueError, match="outside of a page"):
                files.open(shards, ranges)


def test_shared_memory_ends_with_its_tensor() -> None:
    tensor, file = memory.shared((2, 512), torch.uint8)
    assert not tensor.any() and os.path.exists(file)
    del tensor
    assert not os.path.exists(file)


def test_heads_of_drafts_are_found_by_their_own_numbers() -> None:
    """An EAGLE head has other KV heads than its model: 4 beside 8, on 2 ranks and on 8, of which two have the same."""

    def shard(heads: int, head: int, drafts: int, draft_head: int) -> Shard:
        own, other = (
            tuple(KVComponent(name, count, dim, "float32", 4) for name in "kv")
            for count, dim in ((heads, 16), (drafts, 32))
        )
        group = KVGroup(layers=(0, 1), components=own, drafts=other, num_drafts=1, block_size=16)
        return Shard(geometry=KVGeometry(groups=(group,)), head=head, draft_head=draft_head)

    two = tuple(shard(4, 4 * rank, 2, 2 * rank) for rank in range(2))
    for rank in range(8):
        *_, key, value = cut(shard(1, rank, 1, rank // 2), two)
        assert (key.rank, key.start) == (rank // 4, 8192 + 2048 * (rank // 2 % 2)), "behind 2 x 4 heads of the model"
        assert (value.rank, value.start) == (rank // 4, 12288 + 2048 * (rank // 2 % 2))
    few = tuple(shard(1, 0, 1, rank) for rank in range(2))  # the model has 1 head, which both ranks hold
    assert [{one.rank for one in cut(mine, few)} for mine in few] == [{0}, {1}]
