"""Kernels that exchange data between ranks: two to eight processes whose memory is a shared file stand for GPUs."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")

from quire.kernels import triton_runtime

from ..support.forks import Forks
from ..support.full import full_rows
from ..support.triton_interpreter import repair_interpreter

ROOM, BLOCKS, CALLS = 1 << 14, 4, 5


def rank_main(number: int, ranks: int, folder: str) -> None:
    """Several calls in turn, of changing sizes, with and without a residual; saves the sums."""
    repair_interpreter()
    from quire.kernels.comm import BUFFERS, Peers
    from quire.kernels.comm.triton import sum_ranks

    def shared(name: str, size: int) -> list[torch.Tensor]:
        return [
            torch.from_file(f"{folder}/{name}{rank}", shared=True, size=size, dtype=torch.uint8)
            for rank in range(ranks)
        ]

    buffers, signals = shared("buffer", BUFFERS * ROOM), shared("signal", 4 * BLOCKS * ranks)
    peers = Peers(
        torch.tensor([one.data_ptr() for one in buffers]),
        torch.tensor([one.data_ptr() for one in signals]),
        number,
        ROOM,
        BLOCKS,
    )
    found = []
    for call in range(CALLS):
        part, residual = inputs(call, number)
        found.append(sum_ranks(part, residual, peers, (2, 0, 1, 0, 1)[call]).clone())
    torch.save(found, f"{folder}/found{number}")


def inputs(call: int, rank: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The part of a rank, and the residual that all ranks share."""
    shape = ((3, 1000), (1, 8), (2, 1024), (3, 999), (1, 4096))[call]
    kind = torch.bfloat16 if call % 2 else torch.float32
    part = torch.randn(shape, generator=torch.Generator().manual_seed(100 * call + rank)).to(kind)
    residual = torch.randn(shape, generator=torch.Generator().manual_seed(call)).to(kind)
    return part, None if call == 2 else residual


@pytest.mark.parametrize("ranks", [3, *full_rows((2, 4, 8))])
def test_every_rank_gets_the_sum(tmp_path: Path, interpreted: Forks, ranks: int) -> None:
    if not triton_runtime.INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    for rank in range(ranks):
        (tmp_path / f"buffer{rank}").write_bytes(bytes(3 * ROOM))
        (tmp_path / f"signal{rank}").write_bytes(bytes(4 * BLOCKS * ranks))
    calls = [(rank, ranks, tmp_path) for rank in range(ranks)]
    codes, said = interpreted.run(tmp_path / "said", "tests.interpreted.test_comm", calls)
    assert codes == [0] * ranks, said
    found = [torch.load(tmp_path / f"found{rank}") for rank in range(ranks)]
    for call in range(CALLS):
        parts = [inputs(call, rank)[0].float() for rank in range(ranks)]
        residual = inputs(call, 0)[1]
        total = sum(parts[1:], parts[0]) + (0 if residual is None else residual.float())
        expected = total.to(inputs(call, 0)[0].dtype)
        for rank in range(ranks):
            torch.testing.assert_close(found[rank][call], expected, rtol=2**-7 if call % 2 else 0, atol=2e-6)
            assert torch.equal(found[rank][call], found[0][call]), "all ranks have the same bits"
    assert all(not any((tmp_path / f"signal{rank}").read_bytes()) for rank in range(ranks)), "signals are 0 after"


def test_compiles_for_hopper(compiled: Callable[[str], set[str]]) -> None:
    assert compiled("compile_comm") == {"_sum_kernel"}
