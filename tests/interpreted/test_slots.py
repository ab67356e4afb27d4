"""Copies of experts: the kernel chooses and counts as PyTorch's operations do, which the other tests compare."""

import os
from collections.abc import Callable

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")

from quire.kernels import triton_runtime
from quire.kernels.expert_copies import triton_slots
from quire.kernels.expert_copies.slots import ExpertSlots, initial_slots

from ..support.triton_interpreter import repair_interpreter

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

EXPERTS = 7


@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (5, 3), (200, 3)])
@pytest.mark.parametrize("first_row", [0, 100_003])
def test_slots_and_counts(tokens: int, k: int, first_row: int) -> None:
    repair_interpreter()
    ids = torch.randint(0, EXPERTS, (tokens, k), dtype=torch.int32, generator=torch.Generator().manual_seed(tokens))
    found, expected = (ExpertSlots(*initial_slots(EXPERTS, 5), first_row=first_row) for _ in range(2))
    ids[tokens // 2 + 1 :] = -1
    chosen = triton_slots.take(ids, found.slots, found.counts, found.load, first_row)
    assert torch.equal(chosen, expected.take(ids))
    assert torch.equal(found.load, expected.load)


def test_rows_without_an_expert() -> None:
    repair_interpreter()
    layer = ExpertSlots(*initial_slots(EXPERTS, 5))
    ids = torch.tensor([[3], [-1], [1 << 30]], dtype=torch.int32)
    chosen = triton_slots.take(ids, layer.slots, layer.counts, layer.load, 0)
    assert chosen.flatten().tolist() == [3 if layer.choose(ids[:1]) == 3 else 10, -1, -1]
    assert layer.load.tolist() == [0, 0, 0, 1, 0, 0, 0]
    assert not len(triton_slots.take(ids[:0], layer.slots, layer.counts, layer.load, 0))


def test_compiles_for_hopper(compiled: Callable[[str], set[str]]) -> None:
    assert compiled("compile_slots") == {"_take_kernel"}
