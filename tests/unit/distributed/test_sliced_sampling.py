"""Sampling of logits that ranks hold in slices: the tokens and codes of one device, for every kind of row."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.assemble.build import vocabulary_slice
from quire.contracts.sampling import SamplerSpec
from quire.distributed import Group
from quire.distributed.vocabulary import VocabularySlice
from quire.kernels.sampling import Rows
from quire.kernels.sampling.inputs import edge_rows
from quire.kernels.sampling.ref import operations
from quire.kernels.sampling.rows import Mode
from quire.kernels.sampling.table import SamplingTable
from quire.kernels.step.upload import Change
from quire.worker.sliced_sampling import SlicedSampling

from ...support.simulated_groups import SimulatedRanks

CPU = torch.device("cpu")
SPECS = [
    SamplerSpec(temperature=0.0, seed=1, num_prompt=2),
    SamplerSpec(temperature=0.7, seed=2, num_prompt=2),
    SamplerSpec(temperature=1.0, seed=2**63 + 5, num_prompt=2),
    SamplerSpec(temperature=5.0, seed=4, num_prompt=2),
]
FILTERED = [
    SamplerSpec(temperature=1.0, top_p=0.8, seed=5, num_prompt=2),
    SamplerSpec(temperature=0.9, top_k=3, seed=6, num_prompt=2),
]
FULL = [
    SamplerSpec(temperature=0.0, repetition_penalty=1.5, seed=7, num_prompt=2),
    SamplerSpec(temperature=1.0, logit_bias=((3, 4.0),), seed=8, num_prompt=2),
]


def write(change: Change) -> None:
    change.table.view(-1).view(torch.int32)[change.offset :][: len(change.words)] = torch.from_numpy(change.words)


def batch(vocab: int, mode: Mode) -> tuple[Tensor, Rows]:
    """Hard rows with every kind of parameters, and three rows that no token can be drawn from."""
    bad = [torch.full((vocab,), -torch.inf), torch.zeros(vocab), torch.zeros(vocab)]
    bad[1][vocab - 1], bad[2][0] = torch.nan, torch.inf
    rows = [*[row for _, row in edge_rows(vocab)], *bad]
    kinds = {
        Mode.GREEDY: SPECS[:1],
        Mode.UNFILTERED: SPECS,
        Mode.FILTERED: SPECS + FILTERED,
        Mode.FULL: SPECS + FILTERED + FULL,
    }[mode]
    specs = [spec for spec in kinds for _ in rows]
    table = SamplingTable(len(specs) + 1, vocab, CPU)
    for slot, spec in enumerate(specs):
        for change in table.admit(slot, spec):
            write(change)
    history = torch.tensor([[1, 3, 5]] * (len(specs) + 1), dtype=torch.int32)
    slots = torch.arange(len(specs))
    return torch.stack(rows * len(kinds)), Rows(slots, torch.full_like(slots, 3), table.rows, history, table.edits)


def draw(logits: Tensor, rows: Rows, mode: Mode, vocab: int, group: Group) -> tuple[list[int], list[int]]:
    own: VocabularySlice = vocabulary_slice(vocab, group)
    sampler = SlicedSampling(operations(len(logits), vocab, CPU), own)
    sampler.sample(logits[:, own.first : own.first + own.count].contiguous(), rows, mode)
    return sampler.tokens[: len(logits)].tolist(), sampler.codes[: len(logits)].tolist()


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(("vocab", "ranks"), [(64, 2), (65, 2), (130, 4), (131, 8)])
def test_the_tokens_of_one_device(vocab: int, ranks: int, mode: Mode) -> None:
    logits, rows = batch(vocab, mode)
    one = operations(len(logits), vocab, CPU)
    one.sample(logits.clone(), rows, mode)
    expected = one.tokens.tolist(), one.codes.tolist()
    assert {0, 1, 2} == set(expected[1]) and len(set(expected[0])) > 2
    for found in SimulatedRanks(ranks).run(partial(draw, logits, rows, mode, vocab)):
        assert found == expected


def test_masks_hold_for_the_whole_vocabulary() -> None:
    vocab, spec = 70, SamplerSpec(temperature=0.0, seed=1, num_prompt=2, grammar=True)
    table = SamplingTable(2, vocab, CPU)
    for change in table.admit(0, spec):
        write(change)
    logits = torch.arange(vocab, dtype=torch.float32)[None]
    rows = Rows(
        torch.zeros(1, dtype=torch.int64),
        torch.full((1,), 3),
        table.rows,
        torch.zeros(2, 4, dtype=torch.int32),
        table.edits,
    )
    mask = np.zeros((1, 3), np.int32)
    mask[0, 0] = 1 << 9  # only token 9

    def work(group: Group) -> list[int]:
        own = vocabulary_slice(vocab, group)
        sampler = SlicedSampling(operations(1, vocab, CPU), own)
        sampler.take_masks(np.zeros(1, np.int32), mask)
        sampler.sample(logits[:, own.first : own.first + own.count].contiguous(), rows, Mode.FULL)
        return sampler.tokens.tolist()

    assert SimulatedRanks(2).run(work) == [[9], [9]]
