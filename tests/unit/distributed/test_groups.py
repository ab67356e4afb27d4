"""Groups of ranks: as threads and as processes, what they exchange, and the debug mode that compares calls."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from quire.contracts.errors import EngineDead
from quire.contracts.parallel import Parallel
from quire.distributed import Group
from quire.distributed.checked_group import CheckedGroup
from quire.distributed.process_group import join_ranks
from quire.distributed.symmetric import SymmetricGroup

from ...support.forks import Forks
from ...support.simulated_groups import SimulatedRanks

CPU = torch.device("cpu")


def rank_main(number: int, folder: str) -> None:
    """Exchange with the other ranks of two stages of two ranks; save the results, which the test compares."""
    groups = join_ranks(f"{folder}/meeting", number, Parallel(tp=2, pp=2), CPU)
    tp, pp = groups.tp, groups.pp
    assert tp is not None and pp is not None and groups.tokens is not None
    x = torch.tensor([1.0, 10.0]) * (number + 1)
    summed, gathered = tp.all_reduce(x.clone()).tolist(), tp.all_gather(x).tolist()
    found = [summed, gathered, tp.rank, pp.rank, groups.tokens.rank, tp.kind]
    if pp.rank == 0:
        for count in range(200):
            pp.post(x + count, 1)
        assert len(pp._sent) <= 64, "what was received long ago is let go"  # type: ignore[attr-defined]
    else:
        got = [pp.receive(torch.empty(2), 0).tolist() for _ in range(200)]
        first = torch.tensor([1.0, 10.0]) * (number - 1)
        assert got == [(first + count).tolist() for count in range(200)]
        found.append(got[0])
    tp.barrier()
    pp.barrier()  # a rank that ends takes what it has not sent along
    Path(folder, f"found{number}").write_text(str(found))
    torch.distributed.destroy_process_group()


def exchange(group: Group) -> list[object]:
    x = torch.tensor([1.0, 10.0]) * (group.rank + 1)
    last = (group.rank + 1) % group.size
    group.send(x, last)
    got = group.receive(torch.empty(2), (group.rank - 1) % group.size)
    group.barrier()
    return [group.all_reduce(x.clone()).tolist(), group.all_gather(x).tolist(), got.tolist()]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_as_threads(size: int) -> None:
    found = SimulatedRanks(size).run(exchange)
    total = size * (size + 1) / 2
    gathered = [[i + 1.0, 10.0 * (i + 1)] for i in range(size)]
    for rank, (summed, every, got) in enumerate(found):
        before = (rank - 1) % size + 1
        assert summed == [total, 10 * total] and every == gathered and got == [before, 10.0 * before]


def test_a_rank_that_fails_ends_the_others() -> None:
    def work(group: Group) -> None:
        if group.rank == 1:
            raise ValueError("this rank fails")
        group.barrier()

    with pytest.raises(Exception, match="fails|BrokenBarrier|^$"):
        SimulatedRanks(3).run(work)


def test_ranks_as_processes(tmp_path: Path, forks: Forks) -> None:
    codes, said = forks.run(tmp_path / "said", rank_main.__module__, [(number, tmp_path) for number in range(4)])
    assert codes == [0] * 4, said
    assert [(tmp_path / f"found{number}").read_text() for number in range(4)] == [
        "[[3.0, 30.0], [[1.0, 10.0], [2.0, 20.0]], 0, 0, 0, 'gloo']",
        "[[3.0, 30.0], [[1.0, 10.0], [2.0, 20.0]], 1, 0, 0, 'gloo']",
        "[[7.0, 70.0], [[3.0, 30.0], [4.0, 40.0]], 0, 1, 1, 'gloo', [1.0, 10.0]]",
        "[[7.0, 70.0], [[3.0, 30.0], [4.0, 40.0]], 1, 1, 1, 'gloo', [2.0, 20.0]]",
    ]


def test_a_sent_tensor_may_change_at_once() -> None:
    def work(group: Group) -> list[float]:
        x = torch.tensor([float(group.rank)])
        group.post(x, 1 - group.rank)
        x.fill_(-1.0)
        return group.receive(torch.empty(1), 1 - group.rank).tolist()

    assert SimulatedRanks(2).run(work) == [[1.0], [0.0]]


@pytest.mark.parametrize("steps", [[3], [5, 3], [4, 4, 3], [2, 2], [2, 5, 2]])
def test_neighbouring_sums_use_different_buffers(steps: list[int]) -> None:
    """Over steps of any number of sums: a rank may still read what the one before wrote."""
    made = object.__new__(SymmetricGroup)
    used = []
    for count in steps:
        made.begin_step()
        used += [made.next_buffer() for _ in range(count)]
    assert all(one != other for one, other in pairwise(used)) and set(used) <= {0, 1, 2}


def test_equal_calls_pass_the_check() -> None:
    found = SimulatedRanks(2).run(lambda group: exchange(CheckedGroup(group, CPU)))
    assert found[0][0] == [3.0, 30.0]


@pytest.mark.parametrize("other", ["shape", "type", "call"])
def test_the_check_names_the_ranks_that_differ(other: str) -> None:
    def work(group: Group) -> str:
        checked, odd = CheckedGroup(group, CPU), group.rank == 2
        x = torch.zeros(4 if odd and other == "shape" else 3, dtype=torch.int32 if odd and other == "type" else None)
        try:
            checked.all_gather(x) if odd and other == "call" else checked.all_reduce(x)
        except EngineDead as error:
            return str(error)
        return ""

    found = SimulatedRanks(3).run(work)
    assert all("make different calls" in one for one in found)
    assert "ranks [2] another one" in found[0] and "all_reduce of [3] float32" in found[0]
    assert "ranks [0, 1] another one" in found[2]
