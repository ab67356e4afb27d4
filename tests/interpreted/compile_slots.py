"""Compiles the choice of experts' copies for GPUs that are not there; prints the kernel."""

import re

import torch

from quire.kernels.expert_copies.triton_slots import take

from .compiling import AbsentGpu, Made


def check(made: Made) -> None:
    """Tokens are counted without a wait for their sum; an addition waits for no other memory."""
    assert re.search(r"(red|atom)\.global\.\S*relaxed\S*add", made.ptx), made.ptx
    assert made.stack == 0


def main() -> None:
    """Few tokens and many, for DeepSeek-V3 and a small model, on Hopper and on Ampere."""
    gpu = AbsentGpu(check)
    for gpu.capability in (90, 80):
        for tokens, top_k, experts, redundant in ((1, 8, 256, 32), (4096, 8, 128, 16), (64, 2, 8, 0)):
            slots = torch.zeros(experts, 1 + redundant, dtype=torch.int32)
            counts, load = torch.zeros(experts, dtype=torch.int32), torch.zeros(experts, dtype=torch.int64)
            ids = torch.zeros(tokens, top_k, dtype=torch.int32)
            take(ids, slots, counts, load, 100_003)
