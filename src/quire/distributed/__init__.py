"""Groups of ranks and the exchange of tensors between them. A rank gets its groups as one object, `Mesh`.

    process_group.py  ranks as processes, over torch.distributed (gloo, NCCL)
    symmetric.py      GPUs of a host: sums through memory that all of them map
    checked_group.py  a group that compares each call with the other ranks' (debug mode)
    vocabulary.py     the slice of the vocabulary that a rank holds

Every rank of a group makes the same calls, in the same order, with the same shapes and types. So no code decides by a
value that other ranks may not have: the plan of a step says everything. Knows kernels; knows no layers and no requests.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """Ranks that exchange tensors. Tensors are contiguous and lie on the device of the group.

    rank   number of this rank in the group, 0 to size - 1
    size   number of ranks in the group
    kind   name of the implementation
    """

    rank: int
    size: int
    kind: str

    def begin_step(self) -> None:
        """Prepare for a step, eager or captured in a CUDA graph. Every rank calls this before its first exchange."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, equal on all of them; it may overwrite and return x."""

    def add(self, part: Tensor, residual: Tensor) -> Tensor:
        """Return residual + the sum of `part` over ranks, equal on all of them; it may overwrite either."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, [size, *x.shape], in the order of ranks."""

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of all ranks, [sum of counts, ...], in the order of ranks.

        x   [counts[rank], ...];  counts   rows of each rank, the same on all ranks; some may be 0
        """

    def scatter_sum(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this rank's rows [counts[rank], ...] of the sum over ranks; it may overwrite x.

        x   [sum of counts, ...], rows of all ranks in the order of ranks
        """

    def all_to_all(self, x: Tensor) -> Tensor:
        """Return the parts that the ranks have for this one, [size, ...], in the order of ranks.

        x   [size, ...]: x[i] goes to rank i
        """

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor to the rank `to`, which calls `receive`. The host does not wait; x may change afterwards.

        On a GPU the launches that follow wait until the tensor is received.
        """

    def post(self, x: Tensor, to: int) -> None:
        """Send a tensor as `send` does, but later kernel launches do not wait for it. Not allowed in a CUDA graph."""

    def receive(self, out: Tensor, source: int) -> Tensor:
        """Wait for the tensor that rank `source` sends, with the shape and dtype of `out`; fill and return `out`."""

    def barrier(self) -> None:
        """Wait until every rank has called this, and the tensors that this rank has sent are received."""
