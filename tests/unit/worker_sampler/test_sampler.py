"""The sampler over its table: each field's effect, mixed batches, failures alone, resuming, log-probabilities."""

import numpy as np
import pytest
import torch

from quire.contracts.sampling import SamplerSpec
from quire.kernels.sampling import ref, specification
from quire.kernels.sampling.inputs import model_like

from ...support.ref_sampler import RefSampler
from ...support.row_logprobs import row_logprobs

VOCAB = 300
PROMPT = [5, 9, 5, 17, 200, 9, 3]


def one(logits, tokens=PROMPT, **fields):
    """The output for one row of one request whose history is `tokens`."""
    table = RefSampler(3, len(logits), 64)
    fields = {"seed": 7, "num_prompt": 4, "temperature": 0.0, **fields}
    table.admit(1, SamplerSpec(**fields), np.array(tokens, np.int32))
    return table.sample(logits.unsqueeze(0), torch.tensor([1]), torch.tensor([len(tokens)]))


def token_of(logits, tokens=PROMPT, **fields):
    output = one(logits, tokens, **fields)
    assert output.failed == {}
    return int(output.tokens[0])


def ramp(*order):
    """Logits where `order` are the most likely ids, best first."""
    logits = torch.zeros(VOCAB)
    for place, token in enumerate(order):
        logits[token] = 10.0 - place
    return logits


SPECS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.05},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"temperature": 1.0, "frequency_penalty": -1.2, "logit_bias": ((4, 5.0), (9, -100.0))},
    {"temperature": 0.9, "top_k": 3, "allowed_ids": (1, 2, 3, 150, 299)},
    {"temperature": 0.0, "bad_words": ((9, 3, 8), (77,)), "min_length": 50, "stop_ids": (0, 1)},
    {"temperature": 1.5, "top_p": 0.5, "presence_penalty": 2.0, "bad_words": ((3, 4),), "logit_bias": ((3, 100.0),)},
]


def mixed_batch(logits):
    table = RefSampler(len(SPECS) + 2, VOCAB, 64)
    for index, fields in enumerate(SPECS):
        tokens = np.array((PROMPT * 3)[: 6 + index], np.int32)
        table.admit(index + 2, SamplerSpec(seed=2**63 + index, num_prompt=4, **fields), tokens)
    slots = torch.arange(len(SPECS)) + 2
    return table, slots, table.lengths[slots]


def test_mixed_batch_equals_the_reference_row_by_row_alone_and_together():
    for trial in range(5):
        logits = model_like(len(SPECS), VOCAB, seed=trial, spread=2.0)
        table, slots, positions = mixed_batch(logits)
        before = logits.clone()
        together = table.sample(logits, slots, positions)
        assert together.failed == {}
        assert torch.equal(logits, before)
        for row, slot in enumerate(slots.tolist()):
            known = table.history[slot, : positions[row]].tolist()
            assert int(together.tokens[row]) == specification.sample(logits[row], table.specs[slot], known), SPECS[row]
            part = slice(row, row + 1)
            alone = table.sample(logits[part], slots[part], positions[part])
            assert alone.tokens.tolist() == together.tokens[part].tolist(), SPECS[row]


def test_order_of_rows_and_small_budgets_change_nothing(monkeypatch):
    logits = model_like(len(SPECS), VOCAB, seed=8)
    table, slots, positions = mixed_batch(logits)
    first = table.sample(logits, slots, positions).tokens
    monkeypatch.setattr(ref, "_BUDGET", 2 * VOCAB)
    shuffle = torch.randperm(len(SPECS), generator=torch.Generator().manual_seed(1))
    again = table.sample(logits[shuffle], slots[shuffle], positions[shuffle]).tokens
    assert torch.equal(again, first[shuffle])


def test_several_rows_of_one_slot_draw_by_their_own_position():
    logits = model_like(1, VOCAB, spread=0.5).expand(8, VOCAB)
    table = RefSampler(1, VOCAB, 64)
    table.admit(0, SamplerSpec(seed=3, num_prompt=2), np.arange(20, dtype=np.int32))
    positions = torch.arange(8) + 5
    tokens = table.sample(logits, torch.zeros(8, dtype=torch.int64), positions).tokens
    assert len(set(tokens.tolist())) > 4


def test_a_resumed_request_continues_with_the_same_tokens():
    def run(table, slot, tokens, count):
        for _ in range(count):
            position = torch.tensor([len(tokens)])
            logits = model_like(1, VOCAB, seed=len(tokens) * 31 + tokens[-1], spread=1.0)
            token = table.sample(logits, torch.tensor([slot]), position).tokens
            table.append(slot, int(token))
            tokens.append(int(token))
        return tokens

    spec = SamplerSpec(
        seed=99, num_prompt=len(PROMPT), top_p=0.9, frequency_penalty=0.8, repetition_penalty=1.2, bad_words=((1, 2),)
    )
    table = RefSampler(2, VOCAB, 64)
    table.admit(0, spec, np.array(PROMPT, np.int32))
    straight = run(table, 0, list(PROMPT), 20)
    table = RefSampler(2, VOCAB, 64)
    table.admit(0, spec, np.array(PROMPT, np.int32))
    half = run(table, 0, list(PROMPT), 9)
    table.release(0)
    table.admit(1, spec, np.array(half, np.int32))
    assert int(table.lengths[1]) == len(half)
    assert run(table, 1, half, 11) == straight


def test_seed_and_position_decide_and_nothing_else():
    logits = torch.zeros(VOCAB)
    base = token_of(logits, temperature=1.0)
    assert token_of(logits, temperature=1.0) == base
    others = [token_of(logits, temperature=1.0, seed=seed) for seed in (8, 7 + (1 << 32), 2**64 - 1)]
    others.append(token_of(logits, tokens=PROMPT + [1], temperature=1.0))
    assert base not in others


def test_greedy_below_the_threshold_and_raised_to_the_coldest_above_it():
    logits = ramp(8, 4)
    assert token_of(logits, temperature=9e-6) == 8
    assert token_of(logits * 1e34, temperature=1.1e-5) == 8  # division by 1.1e-5 would overflow float32 for both


def test_allowed_ids():
    assert token_of(ramp(8, 4, 6), allowed_ids=(6, 100)) == 6
    assert token_of(ramp(8, 4, 6), allowed_ids=(6, VOCAB + 5)) == 6


def test_bad_words_single_and_sequence():
    logits = ramp(8, 4, 6)
    assert token_of(logits, bad_words=((8,),)) == 4
    assert token_of(logits, bad_words=((9, 3, 8),)) == 4  # the history ends with 9, 3
    assert token_of(logits, bad_words=((3, 9, 8),)) == 8
    assert token_of(logits, bad_words=((9, 3, VOCAB + 1), (VOCAB, 8))) == 8
    assert token_of(logits, tokens=[3], num_prompt=1, bad_words=((9, 3, 8),)) == 8


def test_stop_ids_wait_for_the_minimum_length():
    logits = ramp(8, 4)
    assert token_of(logits, stop_ids=(8,), min_length=len(PROMPT) + 1) == 4
    assert token_of(logits, stop_ids=(8,), min_length=len(PROMPT)) == 8


@pytest.mark.parametrize(("bias", "expected"), [(100.0, 50), (-100.0, 4)])
def test_logit_bias_up_to_its_limits(bias, expected):
    target = 50 if bias > 0 else 8
    assert token_of(ramp(8, 4), logit_bias=((target, bias), (VOCAB + 3, 1.0))) == expected


def test_bias_does_not_bring_back_a_masked_token():
    assert token_of(ramp(8, 4), allowed_ids=(4,), logit_bias=((8, 100.0),)) == 4


def test_penalties_change_the_greedy_token():
    logits = ramp(5, 200, 40)  # 5 is in the prompt, 200 in the output
    assert token_of(logits) == 5
    assert token_of(logits, repetition_penalty=3.0) == 40
    assert token_of(logits, presence_penalty=2.0) == 5  # prompt tokens are not penalized
    assert token_of(ramp(200, 5), presence_penalty=2.0) == 5
    assert token_of(ramp(200, 5), frequency_penalty=0.6) == 200
    assert token_of(ramp(200, 5), tokens=PROMPT + [200], frequency_penalty=0.6) == 5


@pytest.mark.parametrize("fields", SPECS, ids=str)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_broken_row_fails_alone(fields, poison):
    logits = model_like(3, VOCAB, seed=1)
    table = RefSampler(3, VOCAB, 64)
    for slot in range(3):
        table.admit(slot, SamplerSpec(seed=slot, num_prompt=4, **fields), np.array(PROMPT, np.int32))
    slots, positions = torch.arange(3), torch.full((3,), len(PROMPT))
    sound = table.sample(logits, slots, positions)
    assert sound.failed == {}
    logits[1, 123] = poison  # for some specs a token that is masked anyway: the row is broken all the same
    output = table.sample(logits, slots, positions)
    assert output.failed == {1: "nan_logits"}
    assert output.tokens.tolist() == [int(sound.tokens[0]), 0, int(sound.tokens[2])]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_to_sample(temperature):
    logits = ramp(8)
    assert one(torch.full((VOCAB,), -torch.inf), temperature=temperature).failed == {0: "no_token"}
    assert one(logits, temperature=temperature, allowed_ids=(8,), bad_words=((8,),)).failed == {0: "no_token"}
    assert one(logits, temperature=temperature, allowed_ids=(VOCAB,), top_p=0.5).failed == {0: "no_token"}


def test_released_slots_sample_greedily_and_a_reused_slot_keeps_nothing():
    table = RefSampler(1, VOCAB, 64)
    here, logits = torch.tensor([0]), ramp(8, 4).unsqueeze(0)
    table.admit(0, SamplerSpec(seed=1, num_prompt=1, temperature=2.0, allowed_ids=(3,)), np.array([1], np.int32))
    assert table.sample(logits, here, torch.tensor([1])).tokens.tolist() == [3]
    table.release(0)
    assert table.sample(logits, here, torch.tensor([1])).tokens.tolist() == [8]
    table.admit(0, SamplerSpec(seed=1, num_prompt=1, temperature=0.0), np.array([1], np.int32))
    assert table.sample(logits, here, torch.tensor([1])).tokens.tolist() == [8]


def test_no_rows():
    table = RefSampler(1, VOCAB, 64)
    none = torch.empty(0, dtype=torch.int64)
    output = table.sample(torch.empty(0, VOCAB), none, none)
    assert output.tokens.shape == (0,)
    assert output.failed == {}


def test_logprobs_of_each_slot_by_its_own_request():
    table = RefSampler(6, VOCAB, 64)
    wanted = [{"num_logprobs": 2}, {}, {"num_logprobs": 0}, {"num_logprobs": -1}, {"logprob_ids": (9, 250)}]
    for slot, fields in enumerate(wanted):
        table.admit(slot, SamplerSpec(seed=0, num_prompt=1, **fields), np.array([1], np.int32))
    logits, slots = model_like(6, VOCAB), torch.tensor([0, 1, 2, 3, 4, 0])
    tokens = logits.argmin(dim=-1)
    found = table.logprobs(logits, slots, tokens)
    assert sorted(found) == [0, 2, 3, 4]
    for slot, rows, k, ids in ((0, [0, 5], 2, None), (2, [2], 0, None), (3, [3], -1, None), (4, [4], 0, (9, 250))):
        expected = row_logprobs(logits[rows], tokens[rows], k, ids and torch.tensor(ids))
        assert found[slot].ids.tolist() == expected.ids.tolist()
        assert found[slot].ranks.tolist() == expected.ranks.tolist() == [VOCAB] * len(rows)
        np.testing.assert_allclose(found[slot].logprobs, expected.logprobs)
