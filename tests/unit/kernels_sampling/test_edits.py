"""Masks, bias and penalties against straightforward Python."""

import random

import pytest
import torch

from quire.contracts.sampling import SamplerSpec
from quire.kernels.sampling import specification
from quire.kernels.sampling.edits import Penalties, completed_words, penalize
from quire.kernels.sampling.inputs import model_like


def penalties(rows):
    columns = torch.tensor(rows, dtype=torch.float32)
    return Penalties(columns[:, 0], columns[:, 1], columns[:, 2])


def test_penalties_equal_the_formula_for_mixed_rows():
    draw = random.Random(3)
    vocab, longest = 40, 64
    settings = [(1.3, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, -1.5), (0.8, -0.4, 1.1), (1.0, 0.0, 0.0)]
    known = [64, 20, 3, 50, 41]
    prompts = [10, 20, 1, 49, 0]
    history = torch.full((5, longest), 2_000_000_000, dtype=torch.int32)  # what lies beyond is not looked at
    for row, length in enumerate(known):
        history[row, :length] = torch.tensor([draw.randrange(vocab) for _ in range(length)])
    logits = model_like(5, vocab)
    logits[0, 5] = -torch.inf
    expected = [
        specification.edited(
            logits[row],
            SamplerSpec(
                seed=0,
                num_prompt=prompts[row],
                repetition_penalty=settings[row][0],
                frequency_penalty=settings[row][1],
                presence_penalty=settings[row][2],
            ),
            history[row, : known[row]].tolist(),
        )
        for row in range(5)
    ]
    untouched = logits[4].clone()
    penalize(logits, penalties(settings), history, torch.tensor(known), torch.tensor(prompts))
    torch.testing.assert_close(logits.double(), torch.stack(expected), rtol=1e-6, atol=1e-6)
    assert torch.equal(logits[4], untouched)


def test_repetition_counts_prompt_and_output_the_others_output_only():
    history = torch.tensor([[1, 2, 2, 3]], dtype=torch.int32)
    one = torch.tensor([4])
    logits = torch.tensor([[2.0, 2.0, -2.0, 2.0]])
    penalize(logits, penalties([(2.0, 0.0, 0.0)]), history, one, torch.tensor([2]))
    assert logits.tolist() == [[2.0, 1.0, -4.0, 1.0]]
    logits = torch.full((1, 4), 5.0)
    penalize(logits, penalties([(1.0, 0.5, 0.25)]), torch.tensor([[1, 2, 2, 2]]), one, torch.tensor([2]))
    assert logits.tolist() == [[5.0, 5.0, 3.75, 5.0]]


def test_ids_outside_the_vocabulary_in_the_history_count_for_nothing():
    logits = torch.ones(1, 4)
    history = torch.tensor([[9, -1, 9]], dtype=torch.int32)
    penalize(logits, penalties([(2.0, 1.0, 1.0)]), history, torch.tensor([3]), torch.tensor([1]))
    assert logits.tolist() == [[1.0] * 4]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], [7]),
        ([1], [2, 7]),
        ([5, 1, 2], [7, 3]),
        ([1, 2, 9], [7]),
        ([1, 2, 1], [2, 7]),
        ([4, 4], [4, 7]),
        ([4], [7]),
    ],
)
def test_bad_words_forbid_the_last_token_after_the_rest(tokens, expected):
    words = ((1, 2), (7,), (5, 1, 2, 3), (4, 4, 4))
    history = torch.tensor([*tokens, 1, 2, 4, 4], dtype=torch.int32)  # what follows is not known yet
    assert sorted(completed_words(words, history, len(tokens))) == sorted(expected)
