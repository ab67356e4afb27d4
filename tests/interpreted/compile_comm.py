"""Compiles the sum over GPUs for GPUs that are not there; prints each kernel."""

import torch

from quire.kernels.comm import Peers
from quire.kernels.comm.triton import sum_ranks

from ..support.full import full_rows
from .compiling import AbsentGpu, Made


def check(made: Made) -> None:
    """Signals are set with release and taken with acquire, both for the whole system."""
    for order in ("release", "acquire"):
        assert f"atom.global.{order}.sys.cas.b32" in made.ptx, made.ptx
    assert made.stack == 0


def main() -> None:
    """Eight ranks, with and without a residual, on Hopper; with --full any number of ranks, also on Ampere."""
    gpu = AbsentGpu(check)
    few = ((90, 8, True), (90, 8, False))
    every = [(capability, ranks, add) for capability in (90, 80) for ranks in (2, 4, 8) for add in (True, False)]
    for gpu.capability, ranks, add in (*few, *full_rows(every)):
        addresses = torch.zeros(ranks, dtype=torch.int64)
        part = torch.zeros(64, 4096, dtype=torch.bfloat16)
        sum_ranks(part, torch.zeros_like(part) if add else None, Peers(addresses, addresses, 1, 1 << 24, 64), 1)
