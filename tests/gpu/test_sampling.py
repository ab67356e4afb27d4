"""Sampling on a GPU, in a CUDA graph, against the CPU's sampler token for token at production shapes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.contracts.sampling import SamplerSpec
from quire.contracts.step import I32
from quire.kernels.sampling import noise
from quire.kernels.sampling.inputs import edge_rows, model_like
from quire.kernels.sampling.rows import Mode
from quire.kernels.sampling.sampler import Sampler
from quire.kernels.sampling.table import SamplingTable
from quire.kernels.sampling.triton import operations
from quire.kernels.sampling.triton_rows import gumbel, near_gumbel
from quire.kernels.step.upload import InPlaceUpload
from quire.kernels.triton_runtime import jit, tl

from ..support.ref_sampler import RefSampler

VOCAB = 151_936
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 700, "top_p": 0.99},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 1.5},
    {"min_p": 0.05},
    {"min_p": 1e-6, "top_p": 0.8},
    {"temperature": 0.05, "top_k": 40},
]
EDITS: list[dict[str, Any]] = [
    {"logit_bias": ((4, 5.0), (9, -100.0)), "frequency_penalty": -1.2, "repetition_penalty": 1.3},
    {"allowed_ids": (1, 2, 3, 150, VOCAB - 1)},
    {"bad_words": ((77, 8), (7,), (4, 77, 9)), "stop_ids": (0, 1), "min_length": 10**6, "presence_penalty": 0.7},
    {},
]


@jit
def noise_error_kernel(worst, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    word = (tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)).to(tl.uint32)
    error = tl.abs(near_gumbel(word, True) - gumbel(word))
    tl.atomic_max(worst, tl.max(error).to(tl.int32, bitcast=True))


@jit
def gumbel_kernel(words, out, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + at, gumbel(tl.load(words + at).to(tl.uint32)))


def test_approximate_noise_is_within_its_bound_for_every_word() -> None:
    worst = torch.zeros(1, dtype=torch.int32, device="cuda")
    noise_error_kernel[(1 << 22,)](worst, 1024)
    error = float(worst.view(torch.float32))
    print(f"largest error of the approximate noise: {error:.3g}")
    assert error < 2e-5


def test_noise_has_the_bits_of_the_cpu() -> None:
    words = torch.randint(0, 1 << 32, (1, 1 << 24), generator=torch.Generator().manual_seed(1))
    out = torch.full((1 << 24,), torch.nan, device="cuda")
    gumbel_kernel[(1 << 14,)](words[0].cuda(), out, 1024)
    expected = noise._gumbel_of(words)[0]
    differ = out.cpu() != expected
    assert differ.sum() <= 4  # about one in 2^28
    torch.testing.assert_close(out.cpu(), expected, rtol=3e-7, atol=0)


class Both:
    """A batch on the GPU, every mode captured, and on the CPU; row r is slot r + 1, slot 0 is for padding."""

    def __init__(
        self,
        specs: Sequence[SamplerSpec],
        tokens: Sequence[Sequence[int]],
        rows: int,
        vocab: int = VOCAB,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        count = len(specs)
        longest = max(map(len, tokens)) + 8
        self.slots, self.positions = torch.arange(count) + 1, torch.tensor([len(row) for row in tokens])
        self.cpu, device = RefSampler(count + 1, vocab, longest), torch.device("cuda")
        device_slots = torch.zeros(rows, dtype=torch.int64, device="cuda")
        device_positions = torch.zeros(rows, dtype=torch.int64, device="cuda")
        history = torch.zeros((count + 1, longest), dtype=torch.int32, device="cuda")
        self.table = SamplingTable(count + 1, vocab, device)
        self.operations = operations(rows, vocab, device)
        self.gpu = Sampler(self.operations, self.table, device_slots, device_positions, history)
        self.logits = torch.zeros((rows, vocab), dtype=dtype, device="cuda")
        for slot, (spec, row) in enumerate(zip(specs, tokens, strict=True), 1):
            self.cpu.admit(slot, spec, row)
            InPlaceUpload.write(self.table.admit(slot, spec))
        device_slots[:count], device_positions[:count] = self.slots.cuda(), self.positions.cuda()
        history.copy_(self.cpu.history)
        self.graphs: dict[Mode, torch.cuda.CUDAGraph] = {}
        for mode in Mode:
            self.gpu.sample(self.logits, mode)
            self.graphs[mode] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[mode]):
                self.gpu.sample(self.logits, mode)

    @property
    def int_slots(self) -> I32:
        """The slots as the worker knows them."""
        return self.slots.numpy().astype(np.int32)

    def agree(self, logits: Tensor, mode: Mode | None = None, masks: Mapping[int, I32] | None = None) -> None:
        """`masks`: slot -> words of those whose specs say grammar."""
        count = len(self.slots)
        self.logits[:count] = logits
        if masks:
            masked = np.array(list(masks), np.int32)
            self.gpu.take_masks(self.int_slots, masked, np.stack(list(masks.values())))
        self.gpu.tokens.fill_(-7)
        self.gpu.codes.fill_(77)
        self.graphs[self.table.mode(self.int_slots) if mode is None else mode].replay()
        torch.cuda.synchronize()
        scratch = self.operations.scratch
        assert not scratch.counters.any() and not scratch.broken.any() and not scratch.tally.any()
        expected = self.cpu.sample(self.logits[:count].float().cpu(), self.slots, self.positions, masks)
        assert self.gpu.codes[:count].tolist() == expected.codes.tolist()
        assert self.gpu.tokens[:count].tolist() == expected.tokens.tolist()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("rows", [1, 64])
def test_production_shapes(setting: dict[str, Any], rows: int) -> None:
    live = max(1, rows - 3)
    both = Both([SamplerSpec(seed=2**63 + i, num_prompt=1, **setting) for i in range(live)], [[1, 2]] * live, rows)
    for seed, spread in enumerate((1.0, 3.0)):
        both.agree(model_like(live, VOCAB, seed=seed, spread=spread))


def test_edge_rows_in_one_batch_of_all_settings() -> None:
    for vocab in (130, 50_257):
        rows = [row for _, row in edge_rows(vocab)]
        logits = torch.stack([row for _ in SETTINGS for row in rows])
        specs = [SamplerSpec(seed=i, num_prompt=1, **setting) for i, setting in enumerate(SETTINGS) for _ in rows]
        Both(specs, [[1] * (3 + i % 7) for i in range(len(specs))], len(specs), vocab=vocab).agree(logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mixed_batch_with_long_histories(dtype: torch.dtype) -> None:
    draw = np.random.default_rng(3)
    specs, tokens = [], []
    for i in range(64):
        specs.append(SamplerSpec(seed=i, num_prompt=1000, **SETTINGS[i % len(SETTINGS)], **EDITS[i % len(EDITS)]))
        tokens.append([*draw.integers(0, VOCAB if i % 2 else 50, size=1000 + 331 * i), 4, 77])
    both = Both(specs, tokens, 72, dtype=dtype)
    logits = model_like(64, VOCAB, seed=5).to(dtype)
    logits[5, 77] = torch.nan
    logits[17, 1000] = torch.inf
    logits[18] = -torch.inf
    for _ in range(2):
        both.agree(logits)


def test_masks_beside_rows_without_one() -> None:
    """In a captured graph, other masks in every replay; of many tokens, of few and of a single one."""
    draw = np.random.default_rng(4)
    kinds = [{**setting, **EDITS[i % len(EDITS)]} for i, setting in enumerate(SETTINGS * 4)]
    specs = [SamplerSpec(seed=i, num_prompt=2, grammar=i % 3 != 1, **kind) for i, kind in enumerate(kinds)]
    both = Both(specs, [[1, 2, 77]] * len(specs), 64)
    logits = model_like(len(specs), VOCAB, seed=6)
    logits[2, 9] = torch.nan  # also where its mask hides it
    for share in (0.5, 1e-3, 0.0):
        masks = {}
        for slot in [i + 1 for i, spec in enumerate(specs) if spec.grammar]:
            bits = draw.random(VOCAB) < share
            bits[draw.integers(VOCAB)] = True
            masks[slot] = np.packbits(bits, bitorder="little").view(np.int32)
        both.agree(logits, masks=masks)


def test_scores_that_are_all_alike_are_told_apart() -> None:
    keys = noise.NoiseKey(torch.arange(8), torch.full((8,), 2))
    both = Both([SamplerSpec(seed=seed, num_prompt=1) for seed in range(8)], [[1, 2]] * 8, 8)
    both.agree(-noise.gumbel(keys, 0, VOCAB))
    both.agree(3e4 - noise.gumbel(keys, 0, VOCAB))


def test_logprobs_without_waiting() -> None:
    wanted: list[dict[str, Any]] = [
        {"num_logprobs": 20},
        {},
        {"num_logprobs": 0},
        {"logprob_ids": (9, 250, VOCAB)},
        {"num_logprobs": -1},
    ]
    specs = [SamplerSpec(seed=0, num_prompt=1, **fields) for fields in wanted]
    both = Both(specs, [[1, 2]] * 5, 5)
    logits = model_like(5, VOCAB).to(torch.bfloat16).float()
    both.agree(logits)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = both.gpu.logprobs(both.logits, both.int_slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert found is not None
    expected = both.cpu.logprobs(logits, both.slots, both.gpu.tokens.cpu())
    for slot, one in found()["logprobs"].items():
        assert one.ids.tolist() == expected[slot].ids.tolist()
        assert one.ranks.tolist() == expected[slot].ranks.tolist()
        np.testing.assert_allclose(one.logprobs, expected[slot].logprobs, rtol=1e-5, atol=1e-5)
