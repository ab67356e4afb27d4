"""The kernels around a forward pass, in Triton's interpreter, on steps that are packed as for a device."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.contracts.step import SAMPLE, StepPlan
from quire.kernels import triton_runtime
from quire.kernels.step import RUN_WORDS, StepBuffers, Tables
from quire.worker.packed import PackedSteps

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from quire.kernels.step import triton as step

CPU = torch.device("cpu")
SLOTS, MAX_SEQS, MAX_TOKENS, LENGTH, BLOCK_SIZE = 9, 6, 300, 400, 16
DUMMY = SLOTS - 1


def make_tables(seed: int = 0) -> Tables:
    random = torch.Generator().manual_seed(seed)
    return Tables(
        block_table=torch.randint(1, 10_000, (SLOTS, LENGTH // BLOCK_SIZE), generator=random, dtype=torch.int32),
        computed=torch.randint(0, 50, (SLOTS,), generator=random),
        history=torch.randint(0, 50_000, (SLOTS, LENGTH), generator=random, dtype=torch.int32),
        block_size=BLOCK_SIZE,
    )


def make_buffers() -> StepBuffers:
    def filled(size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full((size,), -7, dtype=dtype)

    return StepBuffers(
        token_ids=filled(MAX_TOKENS), positions=filled(MAX_TOKENS), kv_slots=filled(MAX_TOKENS),
        seq_lens=filled(MAX_SEQS, torch.int32), sample_rows=filled(MAX_SEQS), sample_slots=filled(MAX_SEQS),
        sample_positions=filled(MAX_SEQS),
    )  # fmt: skip


def make_plan(slots: list[int], tokens: list[int], sampled: list[bool]) -> StepPlan:
    i32: Any = lambda values: np.array(values, np.int32)  # noqa: E731
    outputs = np.array([SAMPLE if one else 0 for one in sampled], np.uint8)
    return StepPlan(step=1, slots=i32(slots), num_decodes=0, num_tokens=i32(tokens), num_rows=i32(sampled),
                    outputs=outputs)


STEPS = [
    ([3], [1], [True]),
    ([7, 0, 2], [1, 1, 1], [True] * 3),
    ([1, 5, 4, 0], [200, 1, 33, 1], [False, True, True, True]),
    ([0, 1, 2, 3, 4, 5], [1, 128, 1, 127, 1, 2], [True, True, False, True, True, True]),
    ([6], [17], [False]),
]


@pytest.mark.parametrize(("slots", "tokens", "sampled"), STEPS)
def test_inputs_are_what_the_tables_and_the_plan_say(slots: list[int], tokens: list[int], sampled: list[bool]) -> None:
    tables, buffers = make_tables(), make_buffers()
    packed = PackedSteps(MAX_SEQS, DUMMY, CPU, depth=1, words=1 << 13)
    assert packed.upload(make_plan(slots, tokens, sampled), []) == []
    total = sum(tokens)
    padded = total + 5
    step.build_inputs(packed.device, tables, buffers, tokens=padded, seqs=MAX_SEQS, max_seqs=MAX_SEQS)
    expected = [
        (int(tables.history[slot, p]), p, int(tables.block_table[slot, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE)
        for slot, count in zip(slots, tokens, strict=True)
        for p in range(int(tables.computed[slot]), int(tables.computed[slot]) + count)
    ]
    found = torch.stack((buffers.token_ids, buffers.positions, buffers.kv_slots), 1)
    assert found[:total].tolist() == [list(row) for row in expected]
    assert not found[total:padded].any() and (found[padded:] == -7).all()
    lengths = [int(tables.computed[slot]) + count for slot, count in zip(slots, tokens, strict=True)]
    assert buffers.seq_lens.tolist() == lengths + [0] * (MAX_SEQS - len(slots))
    assert packed.slots.tolist() == slots + [DUMMY] * (MAX_SEQS - len(slots))
    bounds = np.cumsum([0, *tokens]).tolist()
    assert packed.starts.tolist() == bounds + [total] * (MAX_SEQS - len(slots))
    rows = [(bounds[i + 1] - 1, slots[i], lengths[i]) for i, one in enumerate(sampled) if one]
    rows += [(0, DUMMY, 0)] * (MAX_SEQS - len(rows))
    assert list(zip(buffers.sample_rows.tolist(), buffers.sample_slots.tolist(),
                    buffers.sample_positions.tolist(), strict=True)) == rows


@pytest.mark.parametrize(("slots", "tokens", "sampled"), STEPS)
def test_finishing_advances_sequences_and_remembers_tokens(
    slots: list[int], tokens: list[int], sampled: list[bool]
) -> None:
    tables, buffers, before = make_tables(), make_buffers(), make_tables()
    packed = PackedSteps(MAX_SEQS, DUMMY, CPU, depth=1, words=1 << 13)
    packed.upload(make_plan(slots, tokens, sampled), [])
    step.build_inputs(packed.device, tables, buffers, tokens=MAX_TOKENS, seqs=MAX_SEQS, max_seqs=MAX_SEQS)
    drawn, codes = torch.arange(100, 100 + MAX_SEQS), torch.arange(MAX_SEQS, dtype=torch.uint8)
    out = torch.full((2, MAX_SEQS), -7, dtype=torch.int32)
    step.finish_step(packed.device, tables, buffers, drawn, codes, out, max_seqs=MAX_SEQS)
    count = sum(sampled)
    assert out[0].tolist() == [*range(100, 100 + count)] + [-7] * (MAX_SEQS - count)
    assert out[1].tolist() == [*range(count)] + [-7] * (MAX_SEQS - count)
    for slot, number in zip(slots, tokens, strict=True):
        before.computed[slot] += number
    assert torch.equal(tables.computed, before.computed)
    for row, slot in enumerate(slot for slot, one in zip(slots, sampled, strict=True) if one):
        before.history[slot, before.computed[slot]] = 100 + row
    assert torch.equal(tables.history, before.history)


def test_a_token_past_the_longest_context_is_remembered_nowhere() -> None:
    tables, buffers = make_tables(), make_buffers()
    tables.computed[2] = LENGTH - 1
    packed = PackedSteps(MAX_SEQS, DUMMY, CPU, depth=1, words=1 << 13)
    packed.upload(make_plan([2], [1], [True]), [])
    before = tables.history.clone()
    step.build_inputs(packed.device, tables, buffers, tokens=1, seqs=1, max_seqs=MAX_SEQS)
    out = torch.zeros((2, MAX_SEQS), dtype=torch.int32)
    step.finish_step(packed.device, tables, buffers, torch.tensor([9] * MAX_SEQS),
                     torch.zeros(MAX_SEQS, dtype=torch.uint8), out, max_seqs=MAX_SEQS)  # fmt: skip
    assert torch.equal(tables.history, before) and int(out[0, 0]) == 9 and int(tables.computed[2]) == LENGTH


@pytest.mark.parametrize("words", [1 << 12, 1 << 14])
def test_changes_of_any_length_reach_their_addresses(words: int) -> None:
    """Also when they have to be sent in several goes, and one alone is longer than a buffer."""
    random = np.random.default_rng(0)
    targets = [torch.full((size,), -7, dtype=torch.int32) for size in (1, 3, RUN_WORDS, RUN_WORDS + 1, 9000, 2)]
    data = [random.integers(-(2**31), 2**31, len(t), dtype=np.int32) for t in targets]
    packed = PackedSteps(MAX_SEQS, DUMMY, CPU, depth=1, words=words)
    left = [(t.data_ptr(), d) for t, d in zip(targets, data, strict=True)]
    goes = 0
    while left:
        left = packed.upload(None, left)
        step.apply_runs(packed.device)
        goes += 1
    assert (goes > 1) == (words == 1 << 12)
    assert all(t.numpy().tolist() == d.tolist() for t, d in zip(targets, data, strict=True))


def test_a_step_waits_for_changes_that_do_not_fit() -> None:
    packed = PackedSteps(MAX_SEQS, DUMMY, CPU, depth=1, words=1 << 12)
    target = torch.zeros(5000, dtype=torch.int32)
    changes = [(target.data_ptr(), np.arange(5000, dtype=np.int32))]
    plan = make_plan([1], [1], [True])
    assert packed.upload(plan, changes) is changes and not packed.device.any()
    while changes:
        changes = packed.upload(None, changes)
        step.apply_runs(packed.device)
    assert packed.upload(plan, []) == [] and packed.slots.tolist()[0] == 1
    step.apply_runs(packed.device)
    assert target.tolist() == list(range(5000))
