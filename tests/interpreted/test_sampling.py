"""Sampling for GPUs in Triton's interpreter against the CPU's sampler, token for token; and compiled without a GPU."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.contracts.sampling import SamplerSpec
from quire.kernels import triton_runtime
from quire.kernels.sampling import noise
from quire.kernels.sampling.inputs import edge_rows, model_like
from quire.kernels.sampling.rows import Mode, encode_edits, encode_row
from quire.kernels.sampling.sampler import Sampler
from quire.kernels.sampling.table import SamplingTable
from quire.kernels.step.upload import InPlaceUpload

from ..support.full import FULL
from ..support.ref_sampler import CPU, RefSampler

if not triton_runtime.INTERPRETED:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from quire.kernels.sampling import triton as kernels
from quire.kernels.sampling.triton_rows import gumbel, near_gumbel, word_of, words_of_quads
from quire.kernels.triton_runtime import jit, tl

PROMPT = [5, 9, 5, 17, 200, 9, 3]


class Both:
    """A batch on both samplers; row r is slot r + 1, slot 0 is for padding."""

    def __init__(self, specs, tokens, vocab, few=None, longest=None):
        count = len(specs)
        self.slots, self.positions = torch.arange(count) + 1, torch.tensor([len(row) for row in tokens])
        self.cpu, self.table = RefSampler(count + 1, vocab, 64), SamplingTable(count + 1, vocab, CPU)
        made = kernels.operations(count, vocab, CPU)
        self.gpu = Sampler(made, self.table, self.slots, self.positions, self.cpu.history)
        if few is not None:
            made.scratch = kernels.Scratch.make(count, vocab, CPU, few=few, longest=longest)
        for name, value in vars(made.scratch).items():
            if name not in ("vocab", "counters", "broken", "tally"):
                value.view(torch.int32).fill_(-1)  # NaN, or no valid id
        for slot, (spec, row) in enumerate(zip(specs, tokens, strict=True), 1):
            self.admit(slot, spec, row)

    def admit(self, slot, spec, row):
        self.cpu.admit(slot, spec, row)
        InPlaceUpload.write(self.table.admit(slot, spec))

    def mode(self):
        return self.table.mode(self.slots.numpy().astype(np.int32))

    def run(self, logits, mode=None, masks=None):
        """(tokens, codes) on the device and as the CPU says; masks  slot -> words."""
        masks = masks or {}
        if masks:
            masked = np.array(list(masks), np.int32)
            self.gpu.take_masks(self.slots.numpy().astype(np.int32), masked, np.stack(list(masks.values())))
        before, rows = logits.clone(), len(logits)
        self.gpu.tokens.fill_(-7)
        self.gpu.codes.fill_(77)
        self.gpu.sample(logits, self.mode() if mode is None else mode)
        assert torch.equal(logits.nan_to_num(), before.nan_to_num())
        scratch = self.gpu.operations.scratch
        assert not scratch.counters.any() and not scratch.broken.any() and not scratch.tally.any()
        slots, positions = self.slots[:rows], self.positions[:rows]
        expected = self.cpu.sample(logits.float(), slots, positions, masks)
        device = (self.gpu.tokens[:rows].tolist(), self.gpu.codes[:rows].tolist())
        return device, (expected.tokens.tolist(), expected.codes.tolist())


def agree(logits, specs, tokens=None, mode=None, **sizes):
    device, cpu = Both(specs, tokens or [PROMPT] * len(specs), logits.shape[1], **sizes).run(logits, mode)
    assert device == cpu
    return device[0]


SETTINGS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 40, "temperature": 0.05},
    {"top_k": 900},
    {"top_k": 10**12},
    {"top_p": 1e-9},
    {"top_p": 0.6},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-12, "top_p": 0.8},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7},
]


@jit
def noise_kernel(row, position, by_quad, near, by_id, first, COUNT: tl.constexpr):
    low, high = tl.load(row + 4).to(tl.uint32, bitcast=True), tl.load(row + 5).to(tl.uint32, bitcast=True)
    at = tl.load(position)
    quads = tl.arange(0, COUNT // 4)
    places = quads[:, None] * 4 + tl.arange(0, 4)[None, :]
    words = words_of_quads(first // 4 + quads, at, low, high)
    tl.store(by_quad + places, gumbel(words))
    tl.store(near + places, near_gumbel(words, False))
    lane = tl.arange(0, COUNT)
    tl.store(by_id + lane, gumbel(word_of(first + lane, at, low, high)))


@pytest.mark.parametrize(("seed", "position", "first"), [(0, 0, 0), (2**64 - 5, 131_071, 151_040), (7 << 32, 9, 4)])
def test_noise_is_the_cpus(seed, position, first):
    row = torch.from_numpy(encode_row(SamplerSpec(seed=seed, num_prompt=1), 0))
    quad, near, one = torch.full((3, 4096), torch.nan)
    noise_kernel[(1,)](row, torch.tensor([position]), quad, near, one, first, 4096)
    key = noise.NoiseKey(torch.tensor([seed - (seed >> 63 << 64)]), torch.tensor([position]))
    expected = noise.gumbel(key, first, 4096)[0]
    assert torch.equal(quad, expected)
    assert torch.equal(one, expected)
    assert (near - expected).abs().max() < 2e-5


@pytest.mark.parametrize(("vocab", "sizes"), [(3, {}), (2100, {}), (130, {"few": 16, "longest": 64})], ids=str)
def test_edge_rows_in_one_batch_of_all_settings(vocab, sizes):
    rows = [row for _, row in edge_rows(vocab)]
    pairs = [(row, setting) for setting in SETTINGS for row in rows][:: 1 if vocab == 3 else 2]
    specs = [SamplerSpec(seed=2**63 + i, num_prompt=1, **setting) for i, (_, setting) in enumerate(pairs)]
    agree(torch.stack([row for row, _ in pairs]), specs, [[1] * (3 + i % 7) for i in range(len(specs))], **sizes)


@pytest.mark.parametrize("sizes", [{}, {"few": 2, "longest": 32}, {"few": 2, "longest": 2}], ids=str)
def test_what_is_kept_is_exact_with_ties(sizes):
    """Several draws of rows with equals at the boundary: one id too many or too few would be drawn soon."""
    row = torch.full((130,), -3.0)
    row[20:28:2] = 1.0
    settings = [{"top_p": 0.5}, {"top_k": 20, "top_p": 0.5}, {"top_k": 3}]
    draws = [(row, 8, setting, {20, 22, 24, 26}) for setting in settings]
    draws.append((torch.zeros(130), 8, {"top_p": 5 / 130 - 1e-6}, {0, 1, 2, 3, 4}))
    draws.append((torch.zeros(130), 8, {"top_k": 4, "top_p": 1.5 / 130}, {0, 1}))
    logits = torch.stack([values for values, count, _, _ in draws for _ in range(count)])
    specs = [SamplerSpec(seed=i, num_prompt=1, **setting) for _, count, setting, _ in draws for i in range(count)]
    tokens = iter(agree(logits, specs, **sizes))
    for _, count, setting, expected in draws:
        drawn = {next(tokens) for _ in range(count)}
        assert drawn <= expected and len(drawn) > len(expected) // 2, setting


def test_scores_that_are_all_alike_are_told_apart():
    """Logits that cancel the noise: every score is within a rounding of 0, and the last bit decides."""
    keys = noise.NoiseKey(torch.arange(6), torch.full((6,), len(PROMPT)))
    logits = -noise.gumbel(keys, 0, 5000)
    agree(logits, [SamplerSpec(seed=seed, num_prompt=1) for seed in range(6)])
    agree(logits + 3e4, [SamplerSpec(seed=seed, num_prompt=1) for seed in range(6)])


EDITS = st.fixed_dictionaries(
    {},
    optional={
        "logit_bias": st.lists(st.tuples(st.integers(0, 320), st.floats(-100, 100, width=32)), max_size=5).map(tuple),
        "allowed_ids": st.lists(st.integers(0, 320), min_size=1, max_size=9).map(tuple),
        "bad_words": st.lists(st.lists(st.sampled_from([1, 2, 3, 310]), max_size=4).map(tuple), max_size=6).map(tuple),
        "stop_ids": st.lists(st.integers(0, 320), max_size=3).map(tuple),
        "min_length": st.integers(0, 12),
        "repetition_penalty": st.sampled_from([0.01, 0.7, 1.3, 100.0]),
        "frequency_penalty": st.sampled_from([-2.0, 0.37, 1.1]),
        "presence_penalty": st.sampled_from([-1.3, 0.2, 2.0]),
    },
)
DRAWS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 1e-4, 0.5, 1.0, 2.0])},
    optional={
        "top_k": st.sampled_from([1, 2, 7, 50, 290, 2**40]),
        "top_p": st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.9999]),
        "min_p": st.sampled_from([1e-30, 0.01, 0.3, 1.0]),
    },
)


@given(
    rows=st.lists(st.tuples(DRAWS, EDITS, st.lists(st.integers(1, 3), min_size=1, max_size=9)), min_size=1, max_size=4),
    spread=st.sampled_from([0.0, 0.3, 3.0, 40.0]),
    coarse=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    sizes=st.sampled_from([{}, {"few": 16, "longest": 32}]),
)
@settings(max_examples=25 if FULL else 10)
def test_any_request_draws_what_the_cpu_draws(rows, spread, coarse, seed, sizes):
    logits = model_like(len(rows), 300, seed=seed % 1000, spread=spread)
    specs = [SamplerSpec(seed=seed, num_prompt=2, **draw, **edits) for draw, edits, _ in rows]
    agree(logits.round() if coarse else logits, specs, [tokens for _, _, tokens in rows], mode=Mode.FULL, **sizes)


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.UNFILTERED])
@pytest.mark.parametrize("cuts", [(0, 128, 300), (0, 4, 96, 300)])
def test_the_largest_key_of_all_slices_is_the_token(mode, cuts):
    broken = torch.zeros(2, 300)
    broken[0, 290], broken[1] = torch.nan, -torch.inf
    logits = torch.cat([torch.stack([row for _, row in edge_rows(300)]), broken])
    settings = [{"temperature": 0.0}, {}, {"temperature": 0.3}] if mode else [{"temperature": 0.0}]
    specs = [SamplerSpec(seed=7 + i, num_prompt=4, **settings[i % len(settings)]) for i in range(len(logits))]
    both = Both(specs, [PROMPT] * len(specs), 300)
    _, expected = both.run(logits, mode)
    sampler, rows = both.gpu.operations, both.gpu.rows
    keys = [sampler.keys(logits[:, first:end].contiguous(), rows, mode, first).clone() for first, end in pairwise(cuts)]
    sampler.settle(torch.stack(keys).amax(0))
    assert (sampler.tokens.tolist(), sampler.codes.tolist()) == expected
    assert set(expected[1]) == {0, 1, 2}


def test_the_mode_is_the_least_that_serves_all_rows():
    vocab = 300
    specs = [
        SamplerSpec(seed=1, num_prompt=1, temperature=0.0, num_logprobs=3, stop_ids=(3,), min_length=1),
        SamplerSpec(seed=2, num_prompt=1),
        SamplerSpec(seed=3, num_prompt=1, top_k=5),
        SamplerSpec(seed=4, num_prompt=1, frequency_penalty=0.5),
        SamplerSpec(seed=5, num_prompt=1, grammar=True),
    ]
    both = Both(specs, [PROMPT] * 5, vocab)
    slots = np.arange(6, dtype=np.int32)
    assert [both.table.mode(slots[: i + 1]) for i in range(6)] == [
        Mode.GREEDY,
        Mode.GREEDY,
        Mode.UNFILTERED,
        Mode.FILTERED,
        Mode.FULL,
        Mode.FULL,
    ]
    logits = model_like(5, vocab)
    for count, least in ((1, Mode.GREEDY), (2, Mode.UNFILTERED), (3, Mode.FILTERED), (4, Mode.FULL)):
        for mode in Mode:
            if mode >= least:
                device, cpu = both.run(logits[:count], mode)
                assert device == cpu
    both.table.release(4)
    both.table.release(5)
    assert both.mode() == Mode.FILTERED


@pytest.mark.parametrize("mode", list(Mode))
def test_a_broken_row_fails_alone(mode):
    fields = [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"allowed_ids": (1, 2), "presence_penalty": 0.4, "top_k": 9}]
    specs = [SamplerSpec(seed=i, num_prompt=1, **fields[min(i % 4, mode)]) for i in range(16)]
    logits = model_like(16, 300)
    for row, poison in ((1, torch.nan), (4, torch.inf), (6, -torch.nan), (7, torch.nan), (11, torch.inf)):
        logits[row, 123] = poison
    logits[8:10] = -torch.inf
    logits[15, 1:3] = -torch.inf
    device, cpu = Both(specs, [PROMPT] * 16, 300).run(logits, mode)
    assert device == cpu
    assert [device[1][row] for row in (1, 4, 6, 7, 11, 8, 9)] == [1] * 5 + [2] * 2
    assert (device[1][15] == 2) == (mode == Mode.FULL)


@pytest.mark.parametrize("setting", [{"temperature": 0.0}, {}, {"top_k": 20}, {"top_p": 0.9}], ids=str)
def test_how_rows_are_cut_changes_nothing(setting, monkeypatch):
    logits = model_like(3, 9_001, spread=1.0)
    specs = [SamplerSpec(seed=seed, num_prompt=1, **setting) for seed in range(3)]
    whole = agree(logits, specs)
    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    assert agree(logits, specs) == whole
    monkeypatch.setattr(kernels, "PROGRAMS", 15)
    assert agree(logits, specs) == whole


@pytest.mark.parametrize("mode", list(Mode))
def test_half_precision_and_rows_with_gaps(mode):
    logits = model_like(4, 600).to(torch.bfloat16)[:, :500]
    agree(logits, [SamplerSpec(seed=seed, num_prompt=1) for seed in range(4)], mode=max(mode, Mode.UNFILTERED))


def test_a_reused_slot_keeps_nothing():
    both = Both([SamplerSpec(seed=1, num_prompt=1, allowed_ids=(3,), bad_words=((9, 3, 8),))], [PROMPT], 300)
    logits = model_like(1, 300)
    assert both.run(logits)[0] == ([3], [0])
    both.table.release(1)
    InPlaceUpload.write(both.table.admit(1, SamplerSpec(seed=1, num_prompt=1, temperature=0.0)))
    both.gpu.sample(logits, Mode.FULL)
    assert both.gpu.tokens.tolist() == [int(logits.argmax())]


def test_rows_of_the_padding_slot_are_greedy():
    both = Both([SamplerSpec(seed=1, num_prompt=1, top_k=3, min_p=0.1)] * 2, [PROMPT] * 2, 300)
    both.slots[1] = 0
    logits = model_like(2, 300)
    for mode in (Mode.UNFILTERED, Mode.FILTERED, Mode.FULL):
        both.gpu.sample(logits, mode)
        assert int(both.gpu.tokens[1]) == int(logits[1].argmax())


def random_masks(slots, vocab, share, seed=0):
    bits = np.random.default_rng(seed).random((len(slots), -(-vocab // 32) * 32)) < share
    return dict(zip(slots, np.packbits(bits, axis=1, bitorder="little").view(np.int32), strict=True))


@pytest.mark.parametrize("vocab", [300, 2080])
def test_only_what_a_mask_allows_is_drawn(vocab):
    """Masked rows of every kind stand beside rows without a mask; masks have indices other than rows and slots."""
    fields = [
        {"temperature": 0.0},
        {},
        {"top_k": 5},
        {"top_p": 0.9, "min_p": 0.01},
        {"allowed_ids": tuple(range(40, 60))},
        {"repetition_penalty": 1.7, "logit_bias": ((7, 9.0), (8, 9.0), (9, 9.0))},
        {"bad_words": ((3, 8), (17,))},
        {"stop_ids": (4, 5), "min_length": 99, "temperature": 0.0},
    ]
    specs = [SamplerSpec(seed=i, num_prompt=2, grammar=i % 4 != 1, **field) for i, field in enumerate(fields * 3)]
    both = Both(specs, [PROMPT] * len(specs), vocab)
    slots = [i + 1 for i, spec in enumerate(specs) if spec.grammar]
    for share in (0.5, 0.02):
        masks = random_masks(slots, vocab, share)
        logits = model_like(len(specs), vocab)
        device, cpu = both.run(logits, masks=masks)
        assert device == cpu
        for slot, words in masks.items():
            token, code = device[0][slot - 1], device[1][slot - 1]
            assert code == 2 or words.view(np.uint8)[token // 8] >> token % 8 & 1
        free = [i for i, spec in enumerate(specs) if not spec.grammar]
        assert any(device[0][i] for i in free) and not any(device[1][i] for i in free)


def test_masks_are_read_only_where_a_slot_may_have_one_and_fail_rows_alone():
    """Masks of an earlier step have no effect. Also: a mask that allows nothing, one that forbids the id of a NaN."""
    specs = [SamplerSpec(seed=i, num_prompt=1, temperature=0.0, presence_penalty=0.1, grammar=i < 3) for i in range(4)]
    both = Both(specs, [PROMPT] * 4, 300)
    logits = model_like(4, 300)
    logits[2, 5] = torch.nan
    masks = random_masks([1, 2, 3], 300, 0.5) | {2: np.zeros(10, np.int32)}
    masks[3][0] &= ~(1 << 5)
    device, cpu = both.run(logits, masks=masks)
    assert device == cpu and device[1] == [0, 2, 1, 0]
    for slot in (1, 2, 3):
        both.table.release(slot)
        both.cpu.release(slot)
        both.admit(slot, SamplerSpec(seed=slot, num_prompt=1, temperature=0.0, presence_penalty=0.1), PROMPT)
    device, cpu = both.run(model_like(4, 300))
    assert device == cpu and device[1] == [0] * 4


def test_ids_outside_the_vocabulary_are_left_out():
    spec = SamplerSpec(
        seed=0,
        num_prompt=0,
        allowed_ids=(300,),
        stop_ids=(5, 300),
        min_length=9,
        logit_bias=((2, 1.0), (300, 9.0), (2, 4.0)),
        bad_words=((1, 300), (), (2**40, 7)),
    )
    words = encode_edits(spec, 300)
    assert words[:5].tolist() == [0, 1, 1, 1, 2]
    assert words[8:10].tolist() == [5, 2]
    assert words[10:11].view(np.float32) == 4.0
    assert words[11:].tolist() == [0, 2, 2**31 - 1, 7]


def test_logprobs_are_the_cpus():
    wanted = [{"num_logprobs": 2}, {}, {"num_logprobs": 0}, {"num_logprobs": -1}, {"logprob_ids": (9, 250, 300)}]
    specs = [SamplerSpec(seed=0, num_prompt=1, **fields) for fields in [*wanted, {"num_logprobs": 20}]]
    both = Both(specs, [PROMPT] * 6, 300)
    logits = model_like(6, 300)
    logits[0] = logits[0].round()
    both.run(logits)
    found = both.gpu.logprobs(logits, both.slots.numpy())()["logprobs"]
    expected = both.cpu.logprobs(logits, both.slots, both.gpu.tokens)
    assert found.keys() == expected.keys() == {1, 3, 4, 5, 6}
    for slot, one in expected.items():
        for field in ("ids", "logprobs", "ranks"):
            mine, theirs = getattr(found[slot], field), getattr(one, field)
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)
    assert both.gpu.logprobs(logits[1:2], both.slots[1:2].numpy()) is None


def test_compiles_for_hopper(compiled):
    assert compiled("compile_sampling") == {
        "pick_kernel",
        "settle_kernel",
        "stream_kernel",
        "select_kernel",
        "many_kernel",
        "prepare_kernel",
        "edit_kernel",
        "penalize_kernel",
    }
