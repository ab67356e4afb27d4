"""Compiles what the sampler launches, for GPUs that are not there; prints each kernel."""

import torch

from quire.kernels.sampling import Rows
from quire.kernels.sampling.rows import ROW_WORDS, Mode
from quire.kernels.sampling.triton import operations

from ..support.full import full_rows
from .compiling import AbsentGpu


def main() -> None:
    """A vocabulary whose rows are aligned on Hopper; with --full also one whose rows are not, on Ampere."""
    gpu = AbsentGpu(room=163 << 10)  # of sm_80
    older = full_rows([(80, 50_257, torch.bfloat16)])
    for gpu.capability, vocab, dtype in ((90, 151_936, torch.float32), *older):
        slots = torch.zeros(2, dtype=torch.int64)
        sampler = operations(2, vocab, slots.device)
        table, history = (torch.zeros(3, words, dtype=torch.int32) for words in (ROW_WORDS, 64))
        of = Rows(slots, slots, table, history, {})
        logits = torch.zeros(2, vocab, dtype=dtype)
        for mode in (Mode.GREEDY, Mode.UNFILTERED, *full_rows([Mode.FILTERED]), Mode.FULL):
            for rows in (1, 2):
                sampler.sample(logits[:rows], of, mode)
                if mode < Mode.FILTERED:
                    sampler.settle(sampler.keys(logits[:rows], of, mode, 4))
