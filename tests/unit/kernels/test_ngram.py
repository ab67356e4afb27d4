"""N-gram drafts: NumPy's and the kernel's in Triton's interpreter against a search word by word."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from types import ModuleType

import numpy as np
import pytest
import torch

from quire.contracts.step import SAMPLE, StepPlan
from quire.kernels import triton_runtime
from quire.kernels.ngram import ref
from quire.kernels.step import Tables
from quire.kernels.step.upload import InPlaceUpload

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from quire.kernels.ngram import triton

both = pytest.mark.parametrize("ngram", [triton, ref], ids=["triton", "ref"])
SLOTS, LENGTH = 5, 1200


def searched(tokens: list[int], count: int, shortest: int, longest: int) -> list[int]:
    """The drafts, by the words of the contract."""
    for size in range(longest, shortest - 1, -1):
        end = tokens[-size:]
        for at in range(len(tokens) - size):
            if len(end) == size and tokens[at : at + size] == end:
                following = list(tokens)
                for i in range(count):
                    following.append(following[at + size + i])
                return following[len(tokens) :]
    return [-1] * count


def drafts(
    ngram: ModuleType,
    texts: list[list[int]],
    counts: list[int],
    shortest: int,
    longest: int,
    hosted: tuple[int, ...] = (),
) -> list[list[int]]:
    """The tokens that are written behind each text, which is in a slot of its own. Nothing else may change."""
    history = torch.full((SLOTS, LENGTH), 7, dtype=torch.int32)
    for slot, text in enumerate(texts):
        history[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
    computed = torch.tensor([len(text) - 1 for text in texts] + [0] * (SLOTS - len(texts)))
    marks = torch.tensor([int(slot in hosted) for slot in range(SLOTS)], dtype=torch.int32)
    tables = Tables(
        block_tables=torch.zeros(1, SLOTS, 1, dtype=torch.int32),
        computed=computed,
        history=history,
        hosted=marks,
        block_sizes=(16,),
    )
    upload, number = InPlaceUpload(SLOTS - 1, SLOTS - 1, torch.device("cpu")), len(texts)
    plan = StepPlan(
        step=0,
        slots=np.arange(number, dtype=np.int32),
        num_decodes=number,
        num_tokens=np.array(counts, np.int32) + 1,
        num_rows=np.array(counts, np.int32) + 1,
        outputs=np.full(number, SAMPLE, np.uint8),
    )
    upload.send(plan, [])
    before = history.clone()
    ngram.propose(upload.step, tables, shortest, longest)
    found = [
        history[slot, len(text) : len(text) + count].tolist()
        for slot, (text, count) in enumerate(zip(texts, counts, strict=True))
    ]
    for slot, (text, count) in enumerate(zip(texts, counts, strict=True)):
        before[slot, len(text) : len(text) + count] = history[slot, len(text) : len(text) + count]
    assert torch.equal(history, before)
    return found


@both
def test_the_longest_and_then_the_earliest_occurrence_counts(ngram: ModuleType) -> None:
    text = [1, 2, 3, 9, 2, 3, 4, 1, 2, 3, 8, 1, 2, 3]
    assert drafts(ngram, [text], [3], 1, 5) == [[9, 2, 3]]
    assert drafts(ngram, [text], [3], 1, 2) == [[9, 2, 3]]
    assert drafts(ngram, [[5, 3, 6, 2, 3, 7, 2, 3]], [2], 1, 1) == [[6, 2]]
    assert drafts(ngram, [[5, 3, 6, 2, 3, 7, 2, 3]], [2], 2, 4) == [[7, 2]]


@both
def test_a_text_that_repeats_goes_on_with_its_period(ngram: ModuleType) -> None:
    assert drafts(ngram, [[1, 2, 1, 2]], [5], 2, 4) == [[1, 2, 1, 2, 1]]
    assert drafts(ngram, [[4, 4]], [3], 1, 5) == [[4, 4, 4]]


@both
def test_without_an_occurrence_there_is_no_draft(ngram: ModuleType) -> None:
    assert drafts(ngram, [[1, 2, 3], [5], [1, 2, 1]], [2, 2, 1], 1, 3) == [[-1, -1], [-1, -1], [2]]
    assert drafts(ngram, [[1, 2, 1]], [2], 2, 3) == [[-1, -1]]


@both
def test_a_slot_whose_drafts_come_from_the_host_keeps_them(ngram: ModuleType) -> None:
    assert drafts(ngram, [[4, 4], [4, 4], [4, 4]], [2, 2, 2], 1, 5, hosted=(1,)) == [[4, 4], [7, 7], [4, 4]]


@both
@pytest.mark.parametrize("vocab", [2, 4, 40])
def test_drafts_are_those_of_a_plain_search(ngram: ModuleType, vocab: int) -> None:
    random = np.random.default_rng(vocab)
    for shortest, longest in ((1, 1), (1, 5), (3, 5)):
        texts = [random.integers(0, vocab, size).tolist() for size in (random.integers(1, 30), 60, 300, 1100)]
        counts = [3, 0, 7, 60]
        expected = [searched(*one, shortest, longest) for one in zip(texts, counts, strict=True)]
        assert drafts(ngram, texts, counts, shortest, longest) == expected
