"""Pages of ranks that are put together from pages of ranks of another number: every byte is the model's, or none is."""

import os
from dataclasses import replace
from itertools import product

import msgspec
import pytest
import torch
from msgspec import structs

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.contracts.blocks import KVComponent, KVGeometry, KVGroup
from quire.contracts.errors import ConfigError
from quire.contracts.parallel import Parallel
from quire.kernels.native import memory
from quire.kvstore.shards import PageFiles, Range, Shard, cut, place_layers
from quire.plan.kinds import mixer
from quire.plan.kv_geometry import layer_groups, rank_geometry
from quire.plan.meeting_rows.records import Inputs
from quire.plan.meetings import check, met
from quire.plan.placement import ranks

from ...support.tiny_models import Tiny, tiny_config

BLOCKS = 4
SIZES = {"groups": (4, 4, 8)}  # three layers of one kind are two groups
LAYOUTS = {"tp1": (1, 1), "tp2": (2, 1), "tp4": (4, 1), "pp2": (1, 2), "pp3": (1, 3), "tp2-pp2": (2, 2)}
MODELS = {
    "heads": tiny_config(Tiny(family="qwen3", heads=(8, 4)), num_hidden_layers=5),
    "few-heads": tiny_config(Tiny(family="qwen3", heads=(8, 2)), num_hidden_layers=5),
    "latents": tiny_config(Tiny(family="deepseek_v3", heads=(4, 4)), num_hidden_layers=5),
    "indexers": tiny_config(
        Tiny(family="glm_moe_dsa", heads=(4, 4)),
        num_hidden_layers=5,
        indexer_types=["full", "shared", "shared", "full", "shared"],
        mlp_layer_types=None,
    ),
}


def content(layer: int, name: str, head: int, block: int, size: int) -> bytes:
    """Return bytes that only this head of this layer has."""
    seed = torch.Generator().manual_seed(hash((layer, len(name), ord(name[0]), head, block)) % (1 << 31))
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=seed).numpy().tobytes()


def pieces(shard: Shard, block: int) -> list[tuple[int, bytes]]:
    """Return offset and content of every head of a page. Groups have blocks in turn."""
    geometry, found = shard.geometry, []
    index = block % len(geometry.groups)
    group, places = geometry.groups[index], place_layers(geometry)
    for layer in group.layers:
        for part, start in zip(group.of(layer), places[layer], strict=True):
            size = group.block_size * part.head_dim * part.item_bytes
            for head in range(part.num_heads):
                data = content(shard.layer + layer, part.name, shard.heads[index] + head, block, size)
                found.append((start + head * size, data))
    return found


def arguments(model: str) -> ModelArgs:
    """Return the arguments of a model; of "groups", every other layer has half the KV heads, and a window."""
    args = parse_checkpoint_config(MODELS[model.replace("groups", "heads")])
    if model != "groups":
        return args
    whole = args.layers[0]
    half = structs.replace(whole, mixer=structs.replace(whole.mixer, num_kv_heads=2, window=8))
    return replace(args, layers=(whole, half, whole, half, whole))


def engine(model: str, layout: str, *, dtype: str = "float32") -> tuple[list[Shard], list[torch.Tensor]]:
    """Return the shards of an engine, and the memory of its ranks with the content of all blocks."""
    args, (tp, pp) = arguments(model), LAYOUTS[layout]
    parallel, shards, kept = Parallel(tp=tp, pp=pp), [], []
    check(met(Inputs(args=args, parallel=parallel)))
    for rank in ranks(args, parallel):
        geometry = rank_geometry(args, rank, dtype=dtype, device="cpu", block_size=4, sizes=SIZES.get(model))
        firsts = [mixer(args.layers[one[0]].mixer).kv_heads(rank.tp, rank.place)[0] for one in layer_groups(args)]
        pages, file = memory.shared((BLOCKS, geometry.page_bytes), torch.uint8)
        shard = Shard(geometry=geometry, layer=rank.layers[0], heads=tuple(firsts), file=file, token=b"right")
        for block in range(1, BLOCKS):
            for start, data in pieces(shard, block):
                memoryview(pages[block].numpy())[start : start + len(data)] = data
        memoryview(pages[0].numpy())[:5] = shard.token
        kept.append(pages)
        shards.append(shard)
    return shards, kept


@pytest.mark.parametrize("model", [*MODELS, "groups"])
def test_every_layout_reads_every_other(model: str) -> None:
    engines = {layout: engine(model, layout) for layout in LAYOUTS}
    for (name, (mine, _)), (other, (theirs, _)) in product(engines.items(), engines.items()):
        for shard in mine:
            cuts = cut(shard, tuple(theirs))
            for block in range(1, 1 + len(cuts)):
                ranges, page = cuts[block % len(cuts)], bytearray(shard.geometry.page_bytes)
                with PageFiles() as files:
                    files.open(theirs, ranges)
                    files.read(block, memoryview(page))
                for start, data in pieces(shard, block):
                    assert page[start : start + len(data)] == data, f"{name} from {other}"
                assert name != other or len(ranges) == 1


def test_a_rank_reads_its_own_heads_alone() -> None:
    (whole,), _ = engine("heads", "tp1")
    for shard in engine("heads", "tp2")[0]:
        size = shard.geometry.page_bytes
        assert sum(one.length for one in cut(shard, (whole,))[0]) == size == whole.geometry.page_bytes / 2
    (whole,), _ = engine("latents", "tp1")
    page = Range(0, 0, whole.geometry.page_bytes, 0)
    assert all(cut(shard, (whole,)) == ((page,),) for shard in engine("latents", "tp4")[0])


def test_a_quantized_cache_is_cut_like_another_one() -> None:
    (whole,), _ = engine("heads", "tp1", dtype="float8_e4m3fn")
    shard = engine("heads", "tp4", dtype="float8_e4m3fn")[0][3]
    assert {one.length for one in cut(shard, (whole,))[0]} == {4 * shard.geometry.groups[0].components[0].head_dim}


def test_what_no_rank_holds_is_refused() -> None:
    shards, _ = engine("heads", "tp2")
    with pytest.raises(ConfigError, match="none of its ranks has head 2 of layer 0: use the same -tp"):
        cut(engine("heads", "tp1")[0][0], (shards[0],))


def test_a_stage_without_layers_of_a_group_needs_none_of_its_pages() -> None:
    part = KVComponent("k", 2, 8, "float32", 4)

    def shard(*layers: tuple[int, ...], first: int = 0) -> Shard:
        groups = (KVGroup(layers=own, components=(part,), block_size=4) for own in layers)
        return Shard(geometry=KVGeometry(groups=tuple(groups)), layer=first, heads=(0, 0))

    whole = shard((0, 1), (2, 3))
    assert cut(shard((0, 1), ()), (whole,)) == ((Range(0, 0, 512, 0),), ())
    assert cut(shard((), (0, 1), first=2), (whole,)) == ((), (Range(0, 0, 512, 0),))


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
        return Shard(geometry=KVGeometry(groups=(group,)), heads=(head,), draft_heads=(draft_head,))

    two = tuple(shard(4, 4 * rank, 2, 2 * rank) for rank in range(2))
    for rank in range(8):
        *_, key, value = cut(shard(1, rank, 1, rank // 2), two)[0]
        assert (key.rank, key.start) == (rank // 4, 8192 + 2048 * (rank // 2 % 2)), "behind 2 x 4 heads of the model"
        assert (value.rank, value.start) == (rank // 4, 12288 + 2048 * (rank // 2 % 2))
    few = tuple(shard(1, 0, 1, rank) for rank in range(2))  # the model has 1 head, which both ranks hold
    assert [{one.rank for one in cut(mine, few)[0]} for mine in few] == [{0}, {1}]
