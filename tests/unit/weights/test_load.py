"""The loader's proof: every part exactly once, shapes as the config says, leftovers named on both sides."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from quire.args.checkpoint import parse_checkpoint_config
from quire.contracts.errors import WeightsError
from quire.plan.layout import layout, stored_names
from quire.weights.dummy import load_dummy
from quire.weights.load import load_weights
from quire.weights.tied import unread_head
from quire.weights.unpacked import Unpacked

from ...support.filled_models import Taken, built, stored_tensors

CONFIG = {
    "model_type": "qwen3", "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip


def build(dtype: str = "float32", **changes: object) -> Any:
    args = parse_checkpoint_config(CONFIG | changes)
    return Taken(args, layout(args), getattr(torch, dtype))


def write_weights(folder: Path, model: Any) -> dict[str, torch.Tensor]:
    """Random tensors for every place of `model`, under their checkpoint names, in one file."""
    tensors = stored_tensors(model.layout)
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_parts_land_in_their_rows(tmp_path: Path) -> None:
    model = build(attention_bias=True)
    tensors = write_weights(tmp_path, model)
    seen: list[tuple[int, int]] = []
    load_weights(model, tmp_path, progress=lambda done, total: seen.append((done, total)))
    loaded = model.tensors
    prefix = "model.layers.1.self_attn"
    for kind in ("weight", "bias"):
        stacked = torch.cat([tensors[f"{prefix}.{p}_proj.{kind}"] for p in "qkv"])
        assert torch.equal(loaded[f"layers.1.attention.qkv.{kind}"], stacked)
    gate_up = torch.cat([tensors[f"model.layers.0.mlp.{p}_proj.weight"] for p in ("gate", "up")])
    assert torch.equal(loaded["layers.0.mlp.gate_up.weight"], gate_up)
    assert torch.equal(loaded["head.weight"], tensors["lm_head.weight"])
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert seen[0] == (0, size) and seen[-1] == (size, size) and seen == sorted(seen)


def test_converts_dtypes(tmp_path: Path) -> None:
    tensors = write_weights(tmp_path, build())
    model = build("bfloat16")
    load_weights(model, tmp_path)
    assert torch.equal(model.tensors["embed.weight"], tensors["model.embed_tokens.weight"].bfloat16())


def test_harmless_leftovers_are_passed_over(tmp_path: Path) -> None:
    model = build(tie_word_embeddings=True)
    tensors = write_weights(tmp_path, model)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.ones(20, 16)}
    save_file(tensors | old, tmp_path / "model.safetensors")
    load_weights(model, tmp_path)
    assert torch.equal(model.tensors["embed.weight"], tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("tied", "row", "said"),
    [(True, 0, True), (True, 10, True), (True, 19, True), (True, None, False), (False, 0, False)],
    ids=str,
)
def test_a_tied_head_that_differs_is_said_not_to_be_read(
    tmp_path: Path, tied: bool, row: int | None, said: bool
) -> None:
    """Not of the many checkpoints that store the embedding twice."""
    tensors = write_weights(tmp_path, build(tie_word_embeddings=True))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": tied}))
    assert unread_head(tmp_path) == ()
    head = tensors["model.embed_tokens.weight"].clone()
    if row is not None:
        head[row, 15] += 1.0
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    notes = unread_head(tmp_path)
    for other in (head.double(), torch.cat((head, head))):  # could not be used
        save_file(tensors | {"lm_head.weight": other}, tmp_path / "model.safetensors")
        assert unread_head(tmp_path) == ()
    assert len(notes) == said
    assert all("lm_head.weight in model.safetensors" in note and "tie_word_embeddings=false" in note for note in notes)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "lacks model.layers.1.mlp.up_proj.weight"),
        (
            {"model.norm.weight": None, **{f"model.ln_{i}.weight": torch.ones(16) for i in range(4)}},
            "No parameter reads model.ln_0.weight (in model.safetensors), model.ln_1.weight (in model.safetensors), "
            "model.ln_2.weight (in model.safetensors) and 1 more.",
        ),
        ({"lm_head.weight": None}, "tie_word_embeddings"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, "model.layers.0.self_attn.q_proj.bias (in model"),
        ({"model.layers.2.mlp.up_proj.weight": torch.ones(24, 16)}, "model.layers.2.mlp.up_proj.weight (in model"),
        ({"model.norm.weight": torch.ones(15)}, "model.norm.weight has shape [15], config.json makes it [16]"),
        ({"model.layers.0.self_attn.k_proj.weight": torch.ones(32, 16)}, "has shape [32, 16]"),
        ({"model.norm.weight": torch.ones(16, dtype=torch.int8)}, "stored as I8"),
    ],
    ids=["missing", "renamed", "head", "extra", "layer", "shape", "part", "dtype"],
)
def test_mismatch_is_named(tmp_path: Path, change: dict[str, torch.Tensor | None], named: str) -> None:
    model = build()
    tensors = write_weights(tmp_path, model) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError) as error:
        load_weights(model, tmp_path)
    assert named in str(error.value) and "\n" not in str(error.value)


def test_shards_of_a_real_index(tmp_path: Path) -> None:
    model = build()
    tensors = write_weights(tmp_path, model)
    names = sorted(tensors)
    (tmp_path / "model.safetensors").unlink()
    placed = {}
    for shard, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, tmp_path / f"part-{shard}.safetensors")
        placed |= dict.fromkeys(part, f"part-{shard}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    load_weights(model, tmp_path)
    assert torch.equal(model.tensors["layers.1.mlp.down.weight"], tensors["model.layers.1.mlp.down_proj.weight"])
    assert set(load_file(tmp_path / "part-0.safetensors")) == set(names[::2])


def test_dummy_is_small_seeded_and_everywhere() -> None:
    one, same, other = build(), build(), build()
    load_dummy(one, seed=4)
    load_dummy(same, seed=4)
    load_dummy(other, seed=5)
    assert one.tensors.keys() == {param.name for param in one.layout}
    for param in one.layout:
        a, b, c = (model.tensors[param.name] for model in (one, same, other))
        assert a.shape == param.shape and torch.equal(a, b) and not torch.equal(a, c), param.name
        assert a.abs().max() <= 1e-3 and a.std() > 4e-4, param.name


MOE = CONFIG | {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "mlp_only_layers": [0],
}


def build_moe(experts: tuple[int, ...] | None = None, in_place: bool = False, **changes: object) -> Any:
    args = parse_checkpoint_config(MOE | changes)
    everything = frozenset(stored_names(layout(args)))
    return Taken(args, layout(args, experts=experts), elsewhere=everything, in_place=in_place)


@pytest.mark.parametrize("in_place", [False, True])
def test_experts_land_in_their_places(tmp_path: Path, in_place: bool) -> None:
    tensors, model = write_weights(tmp_path, build_moe()), build_moe((4, 1), in_place)
    load_weights(model, tmp_path, num_threads=1, chunk_bytes=1000)
    loaded = model.tensors
    at = "model.layers.1.mlp.experts"
    stacked = [tensors[f"{at}.{expert}.{half}_proj.weight"] for expert in (4, 1) for half in ("gate", "up")]
    assert torch.equal(loaded["layers.1.mlp.experts.gate_up"], torch.cat(stacked))
    downs = torch.cat([tensors[f"{at}.{expert}.down_proj.weight"] for expert in (4, 1)])
    assert torch.equal(loaded["layers.1.mlp.experts.down"], downs)


@pytest.mark.parametrize("in_place", [False, True])
def test_an_expert_of_another_rank_is_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    """Of one whole layer's 6 experts only 2 are owned: the bytes of the others are not asked for."""
    tensors, model = write_weights(tmp_path, build_moe()), build_moe((0, 5), in_place)
    asked: list[int] = []  # by several threads

    def preadv(handle: int, buffers: list[memoryview], offset: int) -> int:
        count = real(handle, buffers, offset)
        asked.append(count)
        return count

    real = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    seen: list[tuple[int, int]] = []
    load_weights(model, tmp_path, lambda done, total: seen.append((done, total)))
    unowned = sum(t.nbytes for name, t in tensors.items() if any(f".experts.{e}." in name for e in range(1, 5)))
    owned = sum(tensor.nbytes for tensor in tensors.values()) - unowned
    assert unowned == 4 * 3 * 12 * 16 * 4
    assert seen[-1] == (owned, owned)
    assert sum(asked) == owned


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"num_experts": 4}, ("[6, 16]", "[4, 16]")),
        ({"num_experts": 8}, ("[6, 16]", "[8, 16]")),
        ({"moe_intermediate_size": 8}, ("12", "8")),
    ],
)
def test_a_config_that_contradicts_the_experts_is_refused_with_both_numbers(
    tmp_path: Path, changes: dict[str, object], numbers: tuple[str, str]
) -> None:
    write_weights(tmp_path, build_moe())
    with pytest.raises(WeightsError) as error:
        load_weights(build_moe(**changes), tmp_path)
    assert all(number in str(error.value) for number in numbers)


def test_a_stray_tensor_of_an_owned_expert_is_named(tmp_path: Path) -> None:
    tensors, model = write_weights(tmp_path, build_moe()), build_moe((0, 5))
    stray = {"model.layers.1.mlp.experts.5.gate_proj.bias": torch.ones(12)}
    save_file(tensors | stray, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"experts\.5\.gate_proj\.bias"):
        load_weights(model, tmp_path)


class Operations(TorchDispatchMode):
    """Counts PyTorch's operations of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(load: Callable[[Any], object], num_experts: int) -> int:
    """The operations that fill a model whose layers keep experts as they are stored."""
    model = built(parse_checkpoint_config(MOE | {"num_experts": num_experts}), forced={"experts": "ref"})
    with Operations() as counted:
        load(model)
    return counted.count


def test_the_number_of_experts_costs_no_operation(tmp_path: Path) -> None:
    """Random values fill all experts of a layer at once, and files are read into their places."""
    assert operations(load_dummy, 32) == operations(load_dummy, 4)
    counts = []
    for num_experts in (4, 32):
        write_weights(tmp_path, build_moe(num_experts=num_experts))
        counts.append(operations(lambda model: load_weights(model, tmp_path, num_threads=1), num_experts))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("load", ["dummy", "files"])
def test_experts_in_place_are_neither_copied_nor_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    """A layer computes with the memory that was filled; only other modules are handed to their layers."""
    tensors, model = write_weights(tmp_path, build_moe()), built(build_moe().args, forced={"experts": "ref"})
    layer: Any = model.layers[1]
    room, take, taken = model.destination("layers.1.mlp.experts"), model.take, list[str]()
    monkeypatch.setattr(model, "take", lambda module, *given: taken.append(module) or take(module, *given))
    load_dummy(model) if load == "dummy" else load_weights(model, tmp_path)
    assert room is not None and "layers.1.mlp.experts" not in taken and "layers.1.mlp.router" in taken
    gate_up, down, *_ = layer.mlp.experts.packed
    assert gate_up.data_ptr() == room["gate_up"].data_ptr() and down.data_ptr() == room["down"].data_ptr()
    for expert in range(6):
        at = f"model.layers.1.mlp.experts.{expert}."
        halves = [tensors[f"{at}{half}_proj.weight"] for half in ("gate", "up")]
        for found, stored in ((gate_up, torch.cat(halves)), (down, tensors[f"{at}down_proj.weight"])):
            assert torch.equal(found[expert], stored) == (load == "files")
        assert gate_up[expert].isfinite().all() and gate_up[expert].std() > 0


def test_experts_that_are_loaded_on_another_device_are_packed_one_by_one() -> None:
    """The loader writes into a destination of its own device only."""
    model = build_moe(in_place=True)
    assert [unit.place for unit in Unpacked(model, torch.device("cpu")).units() if unit.in_place] == [0]
    assert not any(unit.in_place for unit in Unpacked(model, torch.device("meta")).units())
