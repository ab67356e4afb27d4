"""Debug mode of groups: before each exchange, the ranks compare what they are about to do.

A rank that makes another call than the others would wait for ever, or read other numbers. Here it raises an error that
names the calls.
"""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.contracts.errors import EngineDead
from quire.distributed import Group


class CheckedGroup(Group):
    """A `Group` that checks before each collective that all ranks make the same call.

    The ranks compare the number of the call, its name, and the shape and dtype of its tensor.
    device   device of the tensors
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device, self._calls = group, device, 0
        self.rank, self.size, self.kind = group.rank, group.size, f"{group.kind}, checked"

    def begin_step(self) -> None:
        self._group.begin_step()

    def all_reduce(self, x: Tensor) -> Tensor:
        self._compare("all_reduce", x)
        return self._group.all_reduce(x)

    def add(self, part: Tensor, residual: Tensor) -> Tensor:
        self._compare("add", part)
        return self._group.add(part, residual)

    def all_gather(self, x: Tensor) -> Tensor:
        self._compare("all_gather", x)
        return self._group.all_gather(x)

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        self._compare_rows("gather_rows", x, counts, counts[self.rank])
        return self._group.gather_rows(x, counts)

    def scatter_sum(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        self._compare_rows("scatter_sum", x, counts, sum(counts))
        return self._group.scatter_sum(x, counts)

    def all_to_all(self, x: Tensor) -> Tensor:
        self._compare("all_to_all", x)
        return self._group.all_to_all(x)

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor without a check: the other ranks take no part."""
        self._group.send(x, to)

    def post(self, x: Tensor, to: int) -> None:
        self._group.post(x, to)

    def receive(self, out: Tensor, source: int) -> Tensor:
        return self._group.receive(out, source)

    def barrier(self) -> None:
        self._compare("barrier", torch.empty(0))
        self._group.barrier()

    def _compare_rows(self, name: str, x: Tensor, counts: Sequence[int], rows: int) -> None:
        """Compare a call whose tensor has `rows` rows, by the counts of all ranks."""
        if len(x) != rows:
            raise EngineDead(f"rank {self.rank} gives {len(x)} rows to {name}, and has told {rows} to the other ranks.")
        self._compare(f"{name} {list(counts)}", x[0] if len(x) else x.new_empty(x.shape[1:]))

    def _compare(self, name: str, x: Tensor) -> None:
        self._calls += 1
        words = f"call {self._calls}: {name} of {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        own = torch.tensor([zlib.crc32(words.encode())], dtype=torch.int64, device=self._device)
        every = self._group.all_gather(own).flatten()
        if bool((every != own).any()):
            others = [rank for rank, code in enumerate(every.tolist()) if code != int(own)]
            raise EngineDead(f"ranks make different calls: rank {self.rank} makes {words}, ranks {others} another one.")
