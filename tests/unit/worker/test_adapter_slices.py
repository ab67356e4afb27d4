"""The matrices of an adapter as a slot holds them, and adapters that do not fit a model."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.adapters.slots import AdaptedLinear, AdapterRules, Module, ModuleRows, SlotPlan
from quire.contracts.adapters import Adapter
from quire.contracts.errors import AdapterError
from quire.contracts.params import Part
from quire.weights.adapter_files import WEIGHTS, identify, read_adapter
from quire.worker import adapter_slices
from quire.worker.adapter_slices import read_held

from ..weights.test_adapter_files import MODULE, write

TAIL = "layers.3.self_attn.q_proj"
EXPERT = "layers.3.experts.0"
SIZES = {f"{EXPERT}.gate": (5, 6), f"{EXPERT}.up": (5, 6), f"{EXPERT}.down": (6, 5)}
RULES = AdapterRules({TAIL: (10, 6)}, frozenset(SIZES), 8, 4)
ROUTED = AdapterRules({TAIL: (10, 6)} | SIZES, frozenset(), 8, 4)
AT = "base_model.model.model.layers.3.mlp.experts"
LINEAR = AdaptedLinear(
    "q", (Module(TAIL, 10, 6, 0, 6),), (ModuleRows(0, 0, 10, Part(TAIL, (10, 6), 0, 10)),), 10, 6, 0, 48
)


def held(adapter: Adapter, dtype: torch.dtype = torch.float32) -> Any:
    return read_held(adapter, RULES, SlotPlan(8, 48 + 80, (LINEAR,)), dtype, pinned=False)


def pair(at: str, a: tuple[int, int], b: tuple[int, int]) -> dict[str, tuple[int, int]]:
    return {f"{at}.lora_A.weight": a, f"{at}.lora_B.weight": b}


def test_ranks_that_an_adapter_lacks_are_zero(tmp_path: Path) -> None:
    numbers, ranks = held(identify("one", write(tmp_path)))
    assert ranks.tolist() == [4] and numbers[:24].eq(1).all() and not numbers[24:48].any()
    assert torch.equal(numbers[48:].view(10, 8), torch.tensor([2.0] * 4 + [0.0] * 4).expand(10, 8))


def test_numbers_that_the_type_cannot_hold(tmp_path: Path) -> None:
    adapter = identify("one", write(tmp_path, {"lora_alpha": 1e6}))
    assert held(adapter).ranks.tolist() == [4]
    with pytest.raises(AdapterError, match="numbers that float16 cannot hold"):
        held(adapter, torch.float16)


def test_files_that_change_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = identify("one", write(tmp_path))

    def change(folder: Path) -> Any:
        found = read_adapter(folder)
        os.utime(folder / WEIGHTS, ns=(1, 1))
        return found

    monkeypatch.setattr(adapter_slices, "read_adapter", change)
    with pytest.raises(AdapterError, match="have changed since they were read"):
        held(adapter)


@pytest.mark.parametrize(
    ("rules", "tensors", "words"),
    [
        (RULES, pair(MODULE, (4, 7), (10, 4)), "for a layer of 10 x 7 numbers, and the model's has 10 x 6"),
        (RULES._replace(rank=3), pair(MODULE, (4, 6), (10, 4)), "has rank 4, and max_lora_rank=3"),
        (RULES, pair(f"{AT}.1.up_proj", (4, 6), (5, 4)), r"add experts \(with all-linear, all other"),
        (RULES, pair(AT, (16, 6), (10, 16)), r"add experts \(with all-linear, all other"),
        (ROUTED, pair(f"{AT}.4.up_proj", (4, 6), (5, 4)), "no linear layer of this model"),
        (ROUTED, pair(f"{AT}.3.w2", (4, 5), (5, 4)), "for a layer of 5 x 5 numbers"),
        (ROUTED, pair(AT, (16, 10), (6, 16)), "experts of 6 x 10 numbers, and the model's have 10 x 6 or 6 x 5"),
        (ROUTED, pair(AT, (12, 6), (10, 12)), "has 12 rows of A, and rank 4 of 4 experts are 16"),
        (ROUTED, pair(AT, (16, 5), (6, 16)) | pair(f"{AT}.base_layer", (16, 5), (6, 16)), "adapters of experts.down_p"),
        (ROUTED, pair(AT, (16, 5), (6, 16)) | pair(f"{AT}.1.w1", (4, 6), (5, 4)), "for single experts and for all"),
    ],
)
def test_adapters_that_do_not_fit(tmp_path: Path, rules: AdapterRules, tensors: Any, words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        rules.check(read_adapter(write(tmp_path, None, tensors)))


def test_adapters_of_experts_that_fit(tmp_path: Path) -> None:
    for tensors in (pair(AT, (16, 6), (10, 16)), pair(f"{AT}.3.w2", (4, 5), (6, 4))):
        ROUTED.check(read_adapter(write(tmp_path, None, tensors)))
