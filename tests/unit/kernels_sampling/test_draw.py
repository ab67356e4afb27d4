"""The three paths against the float64 reference, on rows that break samplers, and against closed-form distributions."""

import pytest
import torch

from quire.contracts.sampling import SamplerSpec
from quire.kernels.sampling import specification
from quire.kernels.sampling.draw import Filters, draw_filtered, draw_greedy, draw_unfiltered
from quire.kernels.sampling.inputs import edge_rows, model_like
from quire.kernels.sampling.noise import NoiseKey, gumbel
from quire.kernels.sampling.order import largest, sorted_by_id, top_by_id


def filters(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return Filters(
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p, dtype=torch.float64),
        torch.full((rows,), min_p, dtype=torch.float64),
    )


def keys(rows, seed=11):
    """The same request at `rows` different positions."""
    return NoiseKey(torch.full((rows,), seed), torch.arange(rows) + 1)


def drawn(logits, key, **kw):
    """Tokens of rows by the path that a request with these parameters takes."""
    if set(kw) <= {"temperature"}:
        return draw_unfiltered(logits, torch.full((logits.shape[0],), kw.get("temperature", 1.0)), key)[0]
    return draw_filtered(logits, filters(logits.shape[0], **kw), key)


SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_k": 1},
    {"top_p": 0.6},
    {"min_p": 0.1},
    {"top_k": 8, "top_p": 0.7},
    {"temperature": 1.4, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_drawn_frequencies_follow_the_closed_form(setting):
    """Chi-square at p = 0.001 with fixed seeds: 12,000 draws of a vocabulary of 20."""
    rows, vocab = 12_000, 20
    row = model_like(1, vocab, seed=4, spread=1.5)[0]
    tokens = drawn(row.expand(rows, vocab), keys(rows), **setting)
    spec = SamplerSpec(seed=0, num_prompt=1, **setting)
    expected = specification.probabilities(row, spec) * rows
    counts = torch.bincount(tokens, minlength=vocab).double()
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    rest, expected_rest = counts[~common].sum(), expected[~common].sum()
    statistic = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum()) - 1
    if expected_rest > 0:
        statistic += float((rest - expected_rest) ** 2 / expected_rest)
        freedom += 1
    # Wilson-Hilferty: the 0.999 quantile of chi-square is close to n * (1 - 2/(9n) + 3.09 * sqrt(2/(9n)))^3.
    spread = 2 / (9 * max(freedom, 1))
    assert statistic <= max(freedom, 1) * (1 - spread + 3.09 * spread**0.5) ** 3 if freedom else statistic == 0


EDGE_SETTINGS = [
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 255},
    {"top_k": 300},
    {"top_k": 10_000},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-12, "top_p": 0.8},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7},
]


@pytest.mark.parametrize("vocab", [3, 257, 1200])
@pytest.mark.parametrize("setting", EDGE_SETTINGS, ids=str)
def test_edge_rows_equal_the_reference(vocab, setting):
    for name, row in edge_rows(vocab):
        spec = SamplerSpec(seed=0, num_prompt=1, **setting)
        allowed = specification.probabilities(row, spec)
        key = keys(4)
        tokens = draw_filtered(row.expand(4, vocab), filters(4, **setting), key)
        expected = (allowed.log() + gumbel(key, 0, vocab)).argmax(dim=-1)
        assert tokens.tolist() == expected.tolist(), name


def test_top_k_keeps_all_equals_of_the_kth():
    row = torch.tensor([0.0, 3.0, 2.0, 2.0, 2.0, 1.0])
    tokens = drawn(row.expand(2000, 6), keys(2000), top_k=2)
    assert set(tokens.tolist()) == {1, 2, 3, 4}


def test_top_p_takes_equals_by_ascending_id_and_reaches_p_exactly():
    row = torch.zeros(8)
    assert set(drawn(row.expand(2000, 8), keys(2000), top_p=0.5).tolist()) == {0, 1, 2, 3}
    assert set(drawn(row.expand(2000, 8), keys(2000), top_p=0.51).tolist()) == {0, 1, 2, 3, 4}


def test_top_p_always_leaves_one():
    row = torch.tensor([0.0, 0.1, 5.0, 0.2])
    assert set(drawn(row.expand(50, 4), keys(50), top_p=1e-12).tolist()) == {2}


def test_filters_that_keep_everything_draw_what_plain_draws():
    logits = model_like(16, 3000, spread=1.0)
    plain = drawn(logits, keys(16))
    assert torch.equal(plain, drawn(logits, keys(16), top_k=3000))
    assert torch.equal(plain, drawn(logits, keys(16), min_p=1e-30))
    assert torch.equal(plain, drawn(logits, keys(16), top_p=1 - 1e-12))


@pytest.mark.parametrize("setting", [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.999}, {"min_p": 0.001}], ids=str)
def test_a_row_draws_the_same_alone_and_in_a_batch(setting):
    """Wide enough that reductions would be split between threads; spreads that mix short and whole-row candidates."""
    vocab = 70_001
    spread = torch.tensor([0.05, 1.0, 3.0, 8.0, 3.0, 0.5]).unsqueeze(1)
    logits, key = model_like(6, vocab, seed=2, spread=1.0) * spread, keys(6)
    together = drawn(logits, key, **setting)
    for row in range(6):
        one = slice(row, row + 1)
        assert drawn(logits[one].clone(), key.rows(one), **setting).tolist() == together[one].tolist()


def test_a_sharded_vocabulary_draws_the_same_token():
    logits, key = model_like(12, 1000, spread=1.0), keys(12)
    ones = torch.ones(12)
    whole, best = draw_unfiltered(logits, ones, key)
    left, left_best = draw_unfiltered(logits[:, :333], ones, key)
    right, right_best = draw_unfiltered(logits[:, 333:], ones, key, first_id=333)
    assert torch.equal(torch.where(left_best >= right_best, left, right), whole)
    assert torch.equal(torch.maximum(left_best, right_best), best)


def test_greedy_takes_the_lowest_id_among_equals_and_shows_nan():
    row = torch.tensor([[1.0, 7.0, 7.0, 0.0], [0.0, float("nan"), 9.0, 1.0]])
    tokens, best = draw_greedy(row)
    assert tokens[0] == 1
    assert best[0] == 7.0
    assert best[1].isnan()
    wide = torch.zeros(3, 40_000)
    wide[:, [17, 20_000, 39_999]] = 1.0
    assert draw_greedy(wide)[0].tolist() == [17, 17, 17]


def test_orders_are_by_value_then_id():
    rows = torch.stack([row for _, row in edge_rows(500)] + [torch.tensor([0.0, -0.0] * 250)])
    stable = torch.sort(rows, dim=-1, descending=True, stable=True)
    values, ids = sorted_by_id(rows)
    assert torch.equal(ids, stable.indices)
    assert torch.equal(values, stable.values)
    for k in (0, 1, 7, 499, 500, 501):
        top, top_ids = top_by_id(rows, k)
        assert torch.equal(top_ids, stable.indices[:, :k])
        assert torch.equal(top, stable.values[:, :k])
        if k:
            assert torch.equal(largest(rows, k)[0], stable.values[:, :k])


def test_few_values_wait_for_no_thread(monkeypatch):
    """PyTorch's float64 logarithm and exponential take threads from 128 values on: not for few rows."""
    logits = model_like(2, 1000)
    expected = [drawn(logits, keys(2), **kw).tolist() for kw in SETTINGS]

    def fail(tensor):
        raise AssertionError(f"threads for {tensor.numel()} values")

    for name in ("log", "log_", "exp", "exp_"):
        monkeypatch.setattr(torch.Tensor, name, fail)
    assert [drawn(logits, keys(2), **kw).tolist() for kw in SETTINGS] == expected
