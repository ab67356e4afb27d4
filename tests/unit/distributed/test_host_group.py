"""Exchanges of GPUs through host memory, on tensors of a CPU: all results are those of gloo alone."""

import subprocess
import sys
from pathlib import Path

RANK = """
import sys
from pathlib import Path
import torch
from quire.config.placement import Parallel
from quire.distributed.process_group import HostGroup, join_ranks
number, folder = int(sys.argv[1]), Path(sys.argv[2])
plain = join_ranks(str(folder / "meeting"), number, Parallel(tp=2), torch.device("cpu")).tp
hosted = HostGroup(plain.group, plain.rank, plain.ranks)
x = torch.arange(12.0).view(4, 3).t() * (number + 1)  # rows are not contiguous
calls = {
    "all_reduce": lambda group: group.all_reduce(x.clone()),
    "add": lambda group: group.add(x.clone(), x + 1),
    "all_gather": lambda group: group.all_gather(x),
    "gather_rows": lambda group: group.gather_rows(x[: number + 1], (1, 2)),
    "scatter_sum": lambda group: group.scatter_sum(x.contiguous(), (1, 2)),
    "no rows": lambda group: group.scatter_sum(x[:0].contiguous(), (0, 0)),
}
for name, call in calls.items():
    one, other = call(hosted), call(plain)
    assert torch.equal(one, other) and one.dtype == other.dtype, name
sent = [torch.tensor(2.5), torch.arange(4.0).to(torch.float8_e4m3fn), torch.ones(2, 3).t(), torch.zeros(0, 2)]
for one in sent:
    for way in (hosted.send, hosted.post):
        if number == 0:
            way(one, 1)
        else:
            got = hosted.receive(torch.empty_like(one).contiguous(), 0)
            assert got.shape == one.shape and torch.equal(got.float(), one.float()), one
hosted.barrier()
print(hosted.kind)
torch.distributed.destroy_process_group()
"""


def test_tensors_go_through_host_memory(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    running = [
        subprocess.Popen([sys.executable, str(script), str(number), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    found = [process.communicate(timeout=120)[0].strip() for process in running]
    assert found == ["gloo through host memory"] * 2 and [one.returncode for one in running] == [0, 0]
