"""Compiles the exchange between GPUs for GPUs that are not there, in a process of its own; prints each kernel."""

import tempfile

import torch
import triton
from compiling import AbsentGpu, Made

from quire.kernels.comm import Peers
from quire.kernels.comm.triton import sum_ranks


def check(made: Made) -> None:
    """Signals are set with release and taken with acquire, both for the whole system."""
    for order in ("release", "acquire"):
        assert f"atom.global.{order}.sys.cas.b32" in made.ptx, made.ptx
    assert made.stack == 0


def main() -> None:
    """Two, four and eight ranks, with and without a residual."""
    gpu = AbsentGpu(check)
    for gpu.capability in (90, 80):
        for ranks in (2, 4, 8):
            addresses = torch.zeros(ranks, dtype=torch.int64)
            part = torch.zeros(64, 4096, dtype=torch.bfloat16)
            for residual in (torch.zeros_like(part), None):
                sum_ranks(part, residual, Peers(addresses, addresses, 1, 1 << 24, 64), 1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        main()
