"""Ranks as threads of one process: exact and fast enough for unit tests. Sums go in the order of ranks."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

WAIT_SECONDS = 60.0  # a rank that waits so long for the others fails
R = TypeVar("R")


class SimulatedRanks:
    """Ranks of a group as threads of this process, for tests. When a rank fails, the others fail, too."""

    def __init__(self, size: int) -> None:
        self._barrier = Barrier(size, timeout=WAIT_SECONDS)
        self._given: list[Tensor] = [torch.empty(0)] * size
        self._mail: dict[tuple[int, int], SimpleQueue[Tensor]] = {
            (source, to): SimpleQueue() for source in range(size) for to in range(size)
        }
        self.groups = tuple(SimulatedGroup(self, rank, size) for rank in range(size))

    def run(self, work: Callable[["SimulatedGroup"], R]) -> list[R]:
        """Call `work` with the group of each rank, in a thread per rank; return the results in the order of ranks."""
        return self.run_each([lambda group=group: work(group) for group in self.groups])  # type: ignore[misc]

    def run_each(self, work: Sequence[Callable[[], R]]) -> list[R]:
        """Call work[i] in the thread of rank i, all at the same time; return the results in the order of ranks."""
        with ThreadPoolExecutor(len(work)) as threads:
            running = [threads.submit(self._guarded, one) for one in work]
            return [one.result() for one in running]

    def _guarded(self, work: Callable[[], R]) -> R:
        try:
            with torch.inference_mode():
                return work()
        except BaseException:
            self._barrier.abort()
            raise

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """Contribute `x` for `rank` and wait for all ranks. Return copies of their tensors, in the order of ranks."""
        self._given[rank] = x
        self._barrier.wait()
        found = [one.clone() for one in self._given]
        self._barrier.wait()
        return found

    def mailbox(self, source: int, to: int) -> "SimpleQueue[Tensor]":
        """Return the queue of tensors that rank `source` sends to rank `to`."""
        return self._mail[source, to]


class SimulatedGroup:
    """A rank of `SimulatedRanks`; see `quire.distributed.Group`."""

    kind = "simulated"

    def __init__(self, ranks: SimulatedRanks, rank: int, size: int) -> None:
        self._ranks, self.rank, self.size = ranks, rank, size

    def begin_step(self) -> None:
        """Do nothing. See `Group`."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over ranks. See `Group`."""
        first, *others = self._ranks.exchange(self.rank, x)
        for one in others:
            first += one
        return first

    def add(self, part: Tensor, residual: Tensor) -> Tensor:
        """Return residual + the sum of the parts. See `Group`."""
        return residual + self.all_reduce(part)

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks. See `Group`."""
        return torch.stack(self._ranks.exchange(self.rank, x))

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of all ranks. See `Group`."""
        return torch.cat(self._ranks.exchange(self.rank, x))

    def scatter_sum(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this rank's rows of the sum over ranks. See `Group`."""
        parts: tuple[Tensor, ...] = self.all_reduce(x).split(list(counts))
        return parts[self.rank]

    def all_to_all(self, x: Tensor) -> Tensor:
        """Return the parts that the ranks have for this one. See `Group`."""
        return torch.stack([one[self.rank] for one in self._ranks.exchange(self.rank, x)])

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor to a rank. See `Group`."""
        self._ranks.mailbox(self.rank, to).put(x.clone())

    def post(self, x: Tensor, to: int) -> None:
        """Send a tensor to a rank. See `Group`."""
        self.send(x, to)

    def receive(self, out: Tensor, source: int) -> Tensor:
        """Wait for a tensor of a rank. See `Group`."""
        x = self._ranks.mailbox(source, self.rank).get(timeout=WAIT_SECONDS)
        assert x.shape == out.shape and x.dtype == out.dtype, "the sender sends other numbers"
        return out.copy_(x)

    def barrier(self) -> None:
        """Wait for all ranks. See `Group`."""
        self._ranks.exchange(self.rank, torch.empty(0))
