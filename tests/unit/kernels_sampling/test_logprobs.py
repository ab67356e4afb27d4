"""Log-probabilities of rows: columns, ranks, ties, chunks."""

import numpy as np
import torch

from quire.kernels.sampling import logprobs
from quire.kernels.sampling.inputs import model_like
from quire.kernels.sampling.logprobs import score_rows
from quire.kernels.sampling.order import top_by_id, top_packed

from ...support.row_logprobs import row_logprobs

LOGITS = model_like(5, 50, seed=9)
CHOSEN = torch.tensor([0, 49, 7, 7, 30])
TRUTH = torch.log_softmax(LOGITS.double(), dim=-1)


def test_first_column_is_the_chosen_token_and_the_rest_the_top_k():
    scored = row_logprobs(LOGITS, CHOSEN, 4)
    top = TRUTH.topk(4, dim=-1)
    assert scored.ids.dtype == np.int32
    assert scored.logprobs.dtype == np.float32
    assert scored.ids[:, 0].tolist() == CHOSEN.tolist()
    assert scored.ids[:, 1:].tolist() == top.indices.tolist()
    np.testing.assert_allclose(scored.logprobs[:, 1:], top.values, atol=1e-5)
    np.testing.assert_allclose(scored.logprobs[:, 0], TRUTH.gather(1, CHOSEN[:, None])[:, 0], atol=1e-5)
    ranks = [int((TRUTH[row] > TRUTH[row, token]).sum()) + 1 for row, token in enumerate(CHOSEN.tolist())]
    assert scored.ranks.tolist() == ranks


def test_zero_alternatives_whole_vocabulary_and_more_than_it():
    assert row_logprobs(LOGITS, CHOSEN, 0).ids.tolist() == CHOSEN[:, None].tolist()
    whole = row_logprobs(LOGITS, CHOSEN, -1)
    assert whole.ids.shape == (5, 51)
    assert (np.diff(whole.logprobs[:, 1:]) <= 0).all()
    np.testing.assert_allclose(np.exp(whole.logprobs[:, 1:].astype(np.float64)).sum(1), 1.0, atol=1e-5)
    assert row_logprobs(LOGITS, CHOSEN, 999).ids.shape == (5, 51)


def test_extra_ids_are_exactly_the_alternatives():
    scored = row_logprobs(LOGITS, CHOSEN, 3, torch.tensor([40, 2, 50]))
    assert scored.ids[:, 1:].tolist() == [[40, 2, 50]] * 5
    np.testing.assert_allclose(scored.logprobs[:, 1:3], TRUTH[:, [40, 2]], atol=1e-5)
    assert (scored.logprobs[:, 3] == -np.inf).all()


def test_equals_come_by_ascending_id_and_share_a_rank():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]])
    scored = row_logprobs(logits, torch.tensor([5]), 4)
    assert scored.ids.tolist() == [[5, 1, 3, 2, 4]]
    assert scored.ranks.tolist() == [3]


def test_chunks_change_nothing(monkeypatch):
    whole = row_logprobs(LOGITS, CHOSEN, 6)
    monkeypatch.setattr(logprobs, "_BUDGET", 100)  # two rows at a time
    parts = row_logprobs(LOGITS, CHOSEN, 6)
    for field in ("ids", "logprobs", "ranks"):
        assert getattr(parts, field).tolist() == getattr(whole, field).tolist()


def test_no_rows():
    scored = row_logprobs(LOGITS[:0], CHOSEN[:0], 5)
    assert scored.ids.shape == (0, 6)
    assert scored.ranks.shape == (0,)


def test_the_order_on_a_gpu_is_the_order_on_a_cpu():
    values = torch.cat((LOGITS, LOGITS.round(), torch.zeros_like(LOGITS), -LOGITS.abs().mul(0)))
    for k in (1, 7, 50):
        expected = top_by_id(values, k)
        assert [part.tolist() for part in top_packed(values, k)] == [part.tolist() for part in expected]


def test_chosen_rows_are_scored_as_if_they_were_alone():
    rows = torch.tensor([3, 1])
    found = score_rows(LOGITS, CHOSEN[rows], 4, None, rows)
    alone = row_logprobs(LOGITS[rows], CHOSEN[rows], 4)
    for part, expected in zip(found, (alone.ids, alone.logprobs, alone.ranks), strict=True):
        assert part.tolist() == expected.tolist()
