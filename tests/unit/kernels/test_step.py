"""The operations around a forward pass, PyTorch's and the kernels in Triton's interpreter, on steps as they come."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from dataclasses import replace as replaced
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from quire.contracts.step import SAMPLE, StepPlan
from quire.kernels import triton_runtime
from quire.kernels.step import NUM_SEQS, RUN_WORDS, StepBuffers, Tables, ref
from quire.kernels.step.packed import PackedUpload
from quire.kernels.step.upload import Change, InPlaceUpload, Upload
from quire.worker.step_drafts import accept

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from quire.kernels.step import triton

CPU = torch.device("cpu")
SLOTS, MAX_SEQS, MAX_TOKENS, LENGTH, BLOCK_SIZES, GROUPS = 9, 6, 300, 400, (16, 64), 2
DUMMY = SLOTS - 1


def make_tables(seed: int = 0) -> Tables:
    random = torch.Generator().manual_seed(seed)
    return Tables(
        block_tables=torch.randint(
            1, 10_000, (GROUPS, SLOTS, LENGTH // min(BLOCK_SIZES)), generator=random, dtype=torch.int32
        ),
        computed=torch.randint(0, 50, (SLOTS,), generator=random),
        history=torch.randint(0, 50_000, (SLOTS, LENGTH), generator=random, dtype=torch.int32),
        hosted=torch.zeros(SLOTS, dtype=torch.int32),
        block_sizes=BLOCK_SIZES,
    )


def make_buffers() -> StepBuffers:
    def filled(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(size, -7, dtype=dtype)

    return StepBuffers(
        token_ids=filled(MAX_TOKENS),
        positions=filled(MAX_TOKENS),
        kv_slots=filled(GROUPS, MAX_TOKENS),
        live=filled(MAX_TOKENS, dtype=torch.bool),
        seq_lens=filled(MAX_SEQS, dtype=torch.int32),
        sample_rows=filled(MAX_SEQS),
        sample_slots=filled(MAX_SEQS),
        sample_positions=filled(MAX_SEQS),
        drafts=filled(MAX_SEQS, dtype=torch.int32),
    )


def make_plan(slots: list[int], tokens: list[int], sampled: list[bool]) -> StepPlan:
    i32: Any = lambda values: np.array(values, np.int32)  # noqa: E731
    outputs = np.array([SAMPLE if one else 0 for one in sampled], np.uint8)
    return StepPlan(
        step=1, slots=i32(slots), num_decodes=0, num_tokens=i32(tokens), num_rows=i32(sampled), outputs=outputs
    )


def packed(words: int = 1 << 13) -> PackedUpload:
    return PackedUpload(MAX_SEQS, DUMMY, CPU, depth=1, max_rows=MAX_SEQS, words=words)


def sent(step: ModuleType, plan: StepPlan) -> Upload:
    """A step as the implementation gets it."""
    upload: Upload = packed() if step is triton else InPlaceUpload(MAX_SEQS, DUMMY, CPU)
    upload.send(plan, [])
    return upload


@pytest.mark.parametrize("by_kernel", [True, False])
def test_words_reach_the_device_and_come_back(by_kernel: bool) -> None:
    upload = PackedUpload(MAX_SEQS, DUMMY, CPU, depth=1, max_rows=700, words=1 << 13, by_kernel=by_kernel)
    table = torch.zeros(3000, dtype=torch.int32)
    upload.send(make_plan([7, 0, 2], [1, 1, 1], [True] * 3), [Change(table, 5, np.arange(2900, dtype=np.int32))])
    upload.apply()
    assert upload.step.slots.tolist() == [7, 0, 2] + [DUMMY] * (MAX_SEQS - 3)
    assert table[5:2905].tolist() == [*range(2900)] and not table[:5].any() and not table[2905:].any()
    for start in (0, 9):
        out = torch.arange(start, start + 2100, dtype=torch.int32).view(3, 700)
        assert np.array_equal(upload.fetch(out)(), out.numpy())


both = pytest.mark.parametrize("step", [triton, ref], ids=["triton", "ref"])
STEPS = [
    ([3], [1], [True]),
    ([7, 0, 2], [1, 1, 1], [True] * 3),
    ([1, 5, 4, 0], [200, 1, 33, 1], [False, True, True, True]),
    ([0, 1, 2, 3, 4, 5], [1, 128, 1, 127, 1, 2], [True, True, False, True, True, True]),
    ([6], [17], [False]),
]


@both
@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize(("slots", "tokens", "sampled"), STEPS)
def test_inputs_are_what_the_tables_and_the_plan_say(
    slots: list[int], tokens: list[int], sampled: list[bool], pad: bool, step: ModuleType
) -> None:
    tables, buffers = make_tables(), make_buffers()
    words = sent(step, make_plan(slots, tokens, sampled)).step
    total = sum(tokens)
    padded, seqs, most_rows = (total + 5, MAX_SEQS, MAX_SEQS) if pad else (total, len(slots), sum(sampled))
    step.build_inputs(words, tables, buffers.cut(padded, seqs, most_rows))
    expected = [
        (
            int(tables.history[slot, p]),
            p,
            *(
                blocks[slot, p // size].item() * size + p % size
                for blocks, size in zip(tables.block_tables, BLOCK_SIZES, strict=True)
            ),
        )
        for slot, count in zip(slots, tokens, strict=True)
        for p in range(int(tables.computed[slot]), int(tables.computed[slot]) + count)
    ]
    found = torch.stack((buffers.token_ids, buffers.positions, *buffers.kv_slots), 1)
    assert found[:total].tolist() == [list(row) for row in expected]
    assert not found[total:padded].any() and (found[padded:] == -7).all()
    assert buffers.live[:total].all() and not buffers.live[total:padded].any()
    lengths = [int(tables.computed[slot]) + count for slot, count in zip(slots, tokens, strict=True)]
    empty = 0 if pad else -7
    assert buffers.seq_lens.tolist() == lengths + [empty] * (MAX_SEQS - len(slots))
    assert words.slots.tolist() == slots + [DUMMY] * (MAX_SEQS - len(slots))
    bounds = np.cumsum([0, *tokens]).tolist()
    assert words.starts.tolist() == bounds + [total] * (MAX_SEQS - len(slots))
    rows = [(bounds[i + 1] - 1, slots[i], lengths[i]) for i, one in enumerate(sampled) if one]
    rows += [(0, DUMMY, 0) if pad else (-7, -7, -7)] * (MAX_SEQS - len(rows))
    assert (
        list(
            zip(
                buffers.sample_rows.tolist(),
                buffers.sample_slots.tolist(),
                buffers.sample_positions.tolist(),
                strict=True,
            )
        )
        == rows
    )


@both
def test_block_tables_are_those_of_the_sequences(step: ModuleType) -> None:
    tables = make_tables()
    words = sent(step, make_plan([7, 0, 2], [1, 1, 1], [True] * 3)).step
    for group in range(GROUPS):
        found, rows = step.gather_blocks(words, tables, group, 3, 9)
        expected = tables.block_tables[group, [7, 0, 2], :9]
        assert torch.equal(found[:, :9] if rows is None else found[rows.long(), :9], expected)


@both
@pytest.mark.parametrize(("slots", "tokens", "sampled"), STEPS)
def test_finishing_advances_sequences_and_remembers_tokens(
    slots: list[int], tokens: list[int], sampled: list[bool], step: ModuleType
) -> None:
    tables, buffers, before = make_tables(), make_buffers(), make_tables()
    words = sent(step, make_plan(slots, tokens, sampled)).step
    step.build_inputs(words, tables, buffers)
    drawn, codes = torch.arange(100, 100 + MAX_SEQS), torch.arange(MAX_SEQS, dtype=torch.uint8)
    out = torch.full((3, MAX_SEQS), -7, dtype=torch.int32)
    step.finish_step(words, tables, buffers, drawn, codes, out)
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
    words = sent(triton, make_plan([2], [1], [True])).step
    before = tables.history.clone()
    triton.build_inputs(words, tables, buffers.cut(1, 1, 1))
    out = torch.zeros((3, MAX_SEQS), dtype=torch.int32)
    triton.finish_step(
        words, tables, buffers, torch.tensor([9] * MAX_SEQS), torch.zeros(MAX_SEQS, dtype=torch.uint8), out
    )
    assert torch.equal(tables.history, before) and int(out[0, 0]) == 9 and int(tables.computed[2]) == LENGTH


@pytest.mark.parametrize("words", [1 << 12, 1 << 14, 0])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_changes_of_any_length_reach_their_places(words: int, dtype: torch.dtype, monkeypatch: Any) -> None:
    """Also when they have to be sent in several goes, and one alone is longer than a buffer; 0: in place."""
    random = np.random.default_rng(0)
    sizes = (2, 4, RUN_WORDS, RUN_WORDS + 2, 9000, 2)
    targets = [torch.full((3, size // (dtype.itemsize // 4)), -7, dtype=dtype) for size in sizes]
    data = [random.integers(-(2**31), 2**31, size, dtype=np.int32) for size in sizes]
    upload: Upload = packed(words) if words else InPlaceUpload(MAX_SEQS, DUMMY, CPU)
    goes: list[int] = []
    apply = upload.apply
    monkeypatch.setattr(upload, "apply", lambda: (goes.append(1), apply())[1])
    changes = [Change(table, size, row) for table, size, row in zip(targets, sizes, data, strict=True)]
    upload.send(make_plan([1], [1], [True]), changes)
    upload.apply()
    assert (len(goes) > 1) == (words == 1 << 12) and upload.step.slots.tolist()[0] == 1
    for table, row in zip(targets, data, strict=True):
        assert table[1].view(torch.int32).tolist() == row.tolist() and (table[[0, 2]] == -7).all()


def test_a_step_waits_for_changes_that_do_not_fit(monkeypatch: Any) -> None:
    """Nothing of it is sent before them: a buffer holds either."""
    upload, sent_first = packed(1 << 12), []
    target = torch.zeros(5000, dtype=torch.int32)
    apply = upload.apply
    monkeypatch.setattr(upload, "apply", lambda: (sent_first.append(int(upload.step.words[NUM_SEQS])), apply())[1])
    upload.send(make_plan([1], [1], [True]), [Change(target, 0, np.arange(5000, dtype=np.int32))])
    assert set(sent_first) == {0} and upload.step.slots.tolist()[0] == 1
    upload.apply()
    assert target.tolist() == list(range(5000))


# --- drafts -------------------------------------------------------------------------------------------------------

ROWS = 12
RUNS = [  # rows of each decode; how many of its drafts are right; its rows with a code; rows that are accepted
    ([4], [3], [[]], [4]),
    ([4, 1, 3], [0, 0, 2], [[], [], []], [1, 1, 3]),
    ([3, 4, 2], [1, 2, 1], [[], [], []], [2, 3, 2]),
    ([4, 4], [3, 3], [[2], [0, 3]], [2, 3]),
    ([2, 3], [1, 2], [[1], [0]], [1, 3]),
]


def drafting(step: ModuleType, rows: list[int]) -> tuple[Upload, Tables, StepBuffers]:
    """Decodes of so many rows, then a prompt of two tokens that samples and a chunk of two that does not."""
    plan = make_plan([*range(len(rows)), 5, 6], [*rows, 2, 2], [True] * (len(rows) + 1) + [False])
    plan = replace(plan, num_decodes=len(rows))
    upload: Upload = InPlaceUpload(MAX_SEQS, DUMMY, CPU)
    if step is triton:
        upload = PackedUpload(MAX_SEQS, DUMMY, CPU, depth=1, max_rows=ROWS, words=1 << 13)
    upload.send(plan, [])
    buffers = replaced(
        make_buffers(),
        **{
            name: torch.full((ROWS,), -7, dtype=getattr(make_buffers(), name).dtype)
            for name in ("sample_rows", "sample_slots", "sample_positions", "drafts")
        },
    )
    return upload, make_tables(), buffers


@both
@pytest.mark.parametrize("pad", [True, False])
def test_rows_of_decodes_are_all_of_their_tokens(step: ModuleType, pad: bool) -> None:
    upload, tables, buffers = drafting(step, [3, 1, 4])
    tables.history[0, tables.computed[0] + 2] = -1
    total, rows = 12, 9
    step.build_inputs(upload.step, tables, buffers.cut(*((total + 5, MAX_SEQS, ROWS) if pad else (total, 5, rows))))
    past = tables.computed[[0, 0, 0, 1, 2, 2, 2, 2, 5]] + torch.tensor([1, 2, 3, 1, 1, 2, 3, 4, 2])
    slots = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 5])
    assert buffers.sample_rows[:rows].tolist() == [*range(8), 9] and torch.equal(buffers.sample_slots[:rows], slots)
    assert torch.equal(buffers.sample_positions[:rows], past)
    known = tables.history[slots[:8], past[:8]]
    expected = [int(known[0]), -1, -1, -1, *known[4:7].tolist(), -1]
    assert buffers.drafts[:8].tolist() == expected and int(buffers.token_ids[2]) == 0, "a draft of -1 is computed as 0"
    assert (~buffers.live[: total + 5 * pad]).nonzero().flatten().tolist() == [2, *range(total, total + 5 * pad)]
    if pad:
        assert set(buffers.drafts[rows:].tolist()) == {-1} and set(buffers.sample_slots[rows:].tolist()) == {DUMMY}


@both
@pytest.mark.parametrize(("rows", "right", "coded", "accepted"), RUNS)
def test_a_run_ends_at_its_first_wrong_draft_or_before_a_row_that_failed(
    step: ModuleType, rows: list[int], right: list[int], coded: list[list[int]], accepted: list[int]
) -> None:
    upload, tables, buffers = drafting(step, rows)
    step.build_inputs(upload.step, tables, buffers)
    before, total = Tables(**{**vars(make_tables())}), sum(rows)
    drawn, codes = torch.arange(100_000, 100_000 + ROWS), torch.zeros(ROWS, dtype=torch.uint8)
    starts = np.cumsum([0, *rows]).tolist()
    for start, count, marks in zip(starts, right, coded, strict=False):
        drawn[start : start + count] = buffers.drafts[start : start + count].long()
        codes[[start + mark for mark in marks]] = 1
    out = torch.full((3, ROWS), -7, dtype=torch.int32)
    step.finish_step(upload.step, tables, buffers, drawn, codes, out)
    assert out[:2, : total + 1].tolist() == [drawn[: total + 1].tolist(), codes[: total + 1].tolist()]
    assert out[2, :total].tolist() == buffers.drafts[:total].tolist()
    for slot, (start, count) in enumerate(zip(starts, accepted, strict=False)):
        at = int(before.computed[slot])
        assert int(tables.computed[slot]) == at + count
        before.history[slot, at + count] = drawn[start + count - 1]
    before.history[5, before.computed[5] + 2] = drawn[total]
    assert torch.equal(tables.history, before.history), "nothing else is written"
    assert tables.computed[[5, 6]].tolist() == (before.computed[[5, 6]] + 2).tolist()
    counts = np.array([*rows, 1], np.int32)
    assert accept(counts, out.numpy()).num_accepted.tolist() == [*accepted, 1], (
        "the host accepts what the device accepts"
    )
