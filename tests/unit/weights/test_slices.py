"""Every family cut into ranks: each rank reads exactly its slices, and the ranks' parts make the model again."""

import json
import os
from collections.abc import Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.args.checkpoint import ModelArgs, parse_checkpoint_config
from quire.contracts.parallel import ALONE, Parallel
from quire.contracts.params import Part
from quire.plan.layout import layout, stored_names
from quire.plan.placement import ranks
from quire.weights.load import load_weights

from ...support.filled_models import Taken, order_of, sliced, stored_tensors
from ...support.thinned import thinned
from ...support.tiny_models import EXPERTS, FAMILIES, Tiny, tiny_config

CUTS = [Parallel(tp=2), Parallel(tp=4), Parallel(pp=2), Parallel(tp=2, pp=2)]
EXPERT_CUTS = [Parallel(tp=2, experts=True), Parallel(tp=4, experts=True), Parallel(tp=2, dp=2, experts=True)]


def arguments(family: str, tied: bool) -> ModelArgs:
    """More KV heads than 2 ranks have each, and fewer than 4 ranks."""
    return parse_checkpoint_config(tiny_config(Tiny(family=family, tied=tied)))


def cuts(family: str) -> Sequence[Parallel]:
    return CUTS + (EXPERT_CUTS if family in EXPERTS else [])


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    asked: list[int] = []
    real = os.preadv

    def preadv(handle: int, buffers: list[memoryview], offset: int) -> int:
        asked.append(count := real(handle, buffers, offset))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    return asked


@pytest.mark.parametrize(("family", "tied"), thinned(FAMILIES, [False, True], every=2))
def test_ranks_make_the_model_again(tmp_path: Path, bytes_read: list[int], family: str, tied: bool) -> None:
    args = arguments(family, tied)
    whole = layout(args)
    stored = stored_tensors(whole)
    save_file(stored, tmp_path / "model.safetensors")
    everything = frozenset(stored_names(whole))
    for parallel in (ALONE, *cuts(family)):
        again = {name: torch.full_like(tensor, torch.nan) for name, tensor in stored.items()}
        for rank in ranks(args, parallel):
            own = layout(args, rank)
            taken: Any = Taken(args, own, elsewhere=everything)
            bytes_read.clear()
            load_weights(taken, tmp_path)
            tensors = taken.tensors
            for param in own:
                loaded = tensors[param.name]
                assert loaded.shape == param.shape, (parallel, param.name)
                for part, rows in zip(param.parts, loaded.split([part.rows for part in param.parts]), strict=True):
                    assert torch.equal(rows, sliced(part, stored[part.stored])), (parallel, param.name)
                    write_back(again[part.stored], part, rows)
            # every number of the slices once, and no other: 4 bytes each
            assert sum(bytes_read) == 4 * sum(tensor.numel() for tensor in tensors.values())
        for name, tensor in stored.items():
            assert torch.equal(again[name], tensor), (parallel, name)


def write_back(stored: Tensor, part: Part, rows: Tensor) -> None:
    """The inverse of a slice with its order."""
    matrix = stored if part.expert < 0 else stored[part.expert]
    target = (matrix.T if part.transposed else matrix).narrow(part.axis, part.start, part.count)
    target[order_of(part, len(rows))] = rows


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_reads_whole_tensors(family: str) -> None:
    """Or, of a tensor that holds several parts of a parameter or parts of several, all of its rows."""
    every = [part for param in layout(arguments(family, False)) for part in param.parts]
    every.sort(key=lambda part: (part.stored, part.expert, part.start))
    for stored, parts in groupby(every, lambda part: (part.stored, part.expert)):
        own = list(parts)
        assert [part.start for part in own] == list(accumulate([0, *(part.count for part in own[:-1])])), stored
        assert sum(part.count for part in own) == own[0].matrix[own[0].axis], stored


def test_a_bias_of_a_sum_belongs_to_one_rank() -> None:
    args = parse_checkpoint_config(tiny_config(Tiny(family="llama", bias=True), num_hidden_layers=1))
    biased = [
        {param.name for param in layout(args, rank) if param.name.endswith((".output.bias", ".down.bias"))}
        for rank in ranks(args, Parallel(tp=2))
    ]
    assert biased == [{"layers.0.attention.output.bias", "layers.0.mlp.down.bias"}, set()]


def test_slices_of_a_real_model(shared: Path) -> None:
    """Qwen3-30B-A3B on 8 ranks: 4 KV heads are copied, 128 experts divided, the vocabulary cut."""
    args = parse_checkpoint_config(json.loads((shared / "hf" / "Qwen3-30B-A3B" / "config.json").read_text()))
    params = {param.name: param for param in layout(args, list(ranks(args, Parallel(tp=8, experts=True)))[5])}
    assert params["layers.7.attention.qkv.weight"].shape == (4 * 128 + 2 * 128, 2048)
    assert [(p.start, p.count) for p in params["layers.7.attention.qkv.weight"].parts] == [
        (20 * 128, 512),
        (256, 128),
        (256, 128),
    ]
    assert params["layers.7.attention.output.weight"].shape == (2048, 512)
    assert params["layers.7.mlp.experts.gate_up"].parts[0].name == "80.gate"
    assert params["layers.7.mlp.experts.down"].shape == (16 * 2048, 768)
    assert params["embed.weight"].parts[0].start == 5 * 151936 // 8
