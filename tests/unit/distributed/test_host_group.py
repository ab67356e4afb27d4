"""Exchanges of GPUs through host memory, on tensors of a CPU: all results are those of gloo alone."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from quire.contracts.parallel import Parallel
from quire.distributed import Group
from quire.distributed.process_group import HostGroup, ProcessGroup, join_ranks

from ...support.forks import Forks


def rank_main(number: int, folder: str) -> None:
    """Make every exchange twice, through host memory and without."""
    plain = join_ranks(f"{folder}/meeting", number, Parallel(tp=2), torch.device("cpu")).tp
    assert isinstance(plain, ProcessGroup)
    hosted = HostGroup(plain.group, plain.rank, plain.ranks)
    x = torch.arange(12.0).view(4, 3).t() * (number + 1)  # rows are not contiguous
    calls: dict[str, Callable[[Group], Tensor]] = {
        "all_reduce": lambda group: group.all_reduce(x.clone()),
        "add": lambda group: group.add(x.clone(), x + 1),
        "all_gather": lambda group: group.all_gather(x),
        "gather_rows": lambda group: group.gather_rows(x[: number + 1], (1, 2)),
        "scatter_sum": lambda group: group.scatter_sum(x.contiguous(), (1, 2)),
        "all_to_all": lambda group: group.all_to_all(x[:2].to(torch.bfloat16)),
        "no rows": lambda group: group.scatter_sum(x[:0].contiguous(), (0, 0)),
    }
    for name, call in calls.items():
        one, other = call(hosted), call(plain)
        assert torch.equal(one, other) and one.dtype == other.dtype, name
    base = torch.arange(12.0).view(4, 3).t()[number]
    assert torch.equal(plain.all_to_all(x[:2]), torch.stack([base, 2 * base]))
    sent = [torch.tensor(2.5), torch.arange(4.0).to(torch.float8_e4m3fn), torch.ones(2, 3).t(), torch.zeros(0, 2)]
    for one in sent:
        for way in (hosted.send, hosted.post):
            if number == 0:
                way(one, 1)
            else:
                got = hosted.receive(torch.empty_like(one).contiguous(), 0)
                assert got.shape == one.shape and torch.equal(got.float(), one.float()), one
    hosted.barrier()
    assert hosted.kind == "gloo through host memory"
    torch.distributed.destroy_process_group()


def test_tensors_go_through_host_memory(tmp_path: Path, forks: Forks) -> None:
    codes, said = forks.run(tmp_path / "said", rank_main.__module__, [(number, tmp_path) for number in range(2)])
    assert codes == [0, 0], said
