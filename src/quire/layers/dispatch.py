"""The way of tokens to experts on the ranks of other replicas, and of results back.

The dispatchers of `config/resolve_moe.py`:

    all-gather   every rank gets the rows of all replicas, runs its own experts on them, and the ranks' results are
                 summed where the rows came from
    pull         GPUs of a host: every rank reads the rows that have an expert there from the memory of the others, and
                 later the results; see `quire.kernels.comm.exchange`

Under tensor parallelism all ranks of a replica have the replica's rows; each brings a share of them, so that a row
travels once.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.config.placement import share
from quire.distributed import Group
from quire.kernels.comm.exchange import Slots
from quire.layers.context import ReplicaTokens

Rows = tuple[Tensor, Tensor, Tensor]  # x [T, hidden], weights [T, k] float32, ids [T, k] int32
Experts = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # (x, weights, ids, residual) -> [T, hidden]


class ExpertExchange(Protocol):
    """This rank's end of the exchange of rows between replicas in lock-step. Every rank makes every call."""

    def run(self, routed: Rows, hidden: Tensor, experts: Experts, replicas: ReplicaTokens) -> Tensor:
        """Return hidden [T, hidden] + the weighted sum of the experts of all ranks for this replica's rows.

        experts   returns the partial sum over this rank's experts, added to a residual if there is one
        It may overwrite `hidden`.
        """


class AllGatherExchange:
    """Exchange by an all-gather of rows and a reduce-scatter of results; see `ExpertExchange`.

    ep   ranks that divide the experts: those of a replica are neighbours
    tp   ranks of this replica; None: it has one
    """

    def __init__(self, ep: Group, tp: Group | None) -> None:
        self._ep, self._tp = ep, tp
        self._each = tp.size if tp is not None else 1  # ranks of a replica
        self._replica, self._place = divmod(ep.rank, self._each)

    def run(self, routed: Rows, hidden: Tensor, experts: Experts, replicas: ReplicaTokens) -> Tensor:
        """Return hidden + the weighted sum of the experts of all ranks. See `ExpertExchange`."""
        rows = replicas.rows
        return hidden + self.combine(experts(*self.dispatch(routed, rows), None), rows)

    def dispatch(self, routed: Rows, rows: Sequence[int]) -> Rows:
        """Return the rows of all replicas, in the order of replicas; `rows` has the count of each."""
        x, _, ids = routed
        assert len(x) == rows[self._replica], f"{len(x)} rows, but the step says {rows[self._replica]}"
        own = slice(*share(len(x), self._each, self._place))
        sent = torch.cat([part[own].contiguous().view(torch.uint8) for part in routed], dim=1)
        got = self._ep.gather_rows(sent, self._counts(rows))
        hidden, k = x.shape[1] * x.element_size(), 4 * ids.shape[1]
        parts = got.split([hidden, k, k], dim=1)
        found = (part.contiguous().view(one.dtype) for part, one in zip(parts, routed, strict=True))
        return next(found), next(found), next(found)

    def combine(self, y: Tensor, rows: Sequence[int]) -> Tensor:
        """Return the sum over ranks of this replica's rows, [T, hidden], from the partial results for all rows."""
        part = self._ep.scatter_sum(y, self._counts(rows))
        if self._tp is None:
            return part
        own = rows[self._replica]
        return self._tp.gather_rows(part, [_share(own, self._each, place) for place in range(self._each)])

    def _counts(self, rows: Sequence[int]) -> list[int]:
        """Rows that each rank brings."""
        return [_share(count, self._each, place) for count in rows for place in range(self._each)]


class PullExchange:
    """Exchange through symmetric memory; see `ExpertExchange`. It can be captured in a CUDA graph.

    slots   the memory of all ranks
    owner   [experts] int32: the rank of each expert, or of each slot if experts are balanced
    """

    def __init__(self, slots: Slots, owner: Tensor) -> None:
        from quire.kernels.comm import triton_exchange  # needs Triton, which only GPUs have

        self.slots, self.owner, self._kernels = slots, owner, triton_exchange

    def run(self, routed: Rows, hidden: Tensor, experts: Experts, replicas: ReplicaTokens) -> Tensor:
        """Return hidden + the weighted sum of the experts of all ranks. See `ExpertExchange`.

        With more tokens than `bound` in some replica, the rows travel in several exchanges, as many on every rank.
        """
        (x, weights, ids), each, most = routed, self.slots.each, replicas.bound
        hidden, bound = hidden.contiguous(), -(-most // each)
        for first in range(0, max(replicas.rows, default=1), bound * each):
            given = ids, replicas.count, self.owner, self.slots, bound, first
            got, got_weights, got_ids, y = self._kernels.dispatch(x, given[0], weights, *given[1:])
            y = experts(got, got_weights, got_ids, y)
            hidden = self._kernels.combine(hidden, y, *given)
        return hidden


def _share(count: int, parts: int, place: int) -> int:
    first, end = share(count, parts, place)
    return end - first
