"""The way of tokens to experts on the ranks of other replicas, and of results back.

The dispatchers of `plan/dispatchers.py`:

    all-gather   every rank gets the rows of all replicas, runs its own experts on them, and the ranks' results are
                 summed where the rows came from. With a bound every replica brings that many rows, so that a CUDA
                 graph can hold the exchange; padding has no experts
    pull         GPUs of a host: every rank reads the rows that have an expert there from the memory of the others, and
                 later the results; see `quire.kernels.comm.exchange`

Rows go to the experts in the form of a `Wire`: as they are, or quantized as the experts would quantize them, so that no
result changes. Results come back as they are.

Under tensor parallelism all ranks of a replica have the replica's rows; each brings a share of them, so that a row
travels once.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.contracts.parallel import share
from quire.distributed import Group
from quire.kernels.comm.exchange import Slots
from quire.kernels.quantize.rows import QuantizedRows
from quire.layers.context import ReplicaTokens

Rows = tuple[Tensor, Tensor, Tensor]  # x [T, hidden], weights [T, k] float32, ids [T, k] int32
Sent = tuple[Tensor | QuantizedRows, Tensor, Tensor]  # as Rows, with x in the form of the wire
Experts = Callable[[Tensor | QuantizedRows, Tensor, Tensor, Tensor | None], Tensor]
Quantize = Callable[[Tensor], QuantizedRows]


class ExpertExchange(Protocol):
    """This rank's end of the exchange of rows between replicas in lock-step. Every rank makes every call."""

    def run(self, routed: Rows, hidden: Tensor, experts: Experts, replicas: ReplicaTokens) -> Tensor:
        """Return hidden [T, hidden] + the weighted sum of the experts of all ranks for this replica's rows.

        experts   function (x, weights, ids, residual) -> [T, hidden], the partial sum over this rank's experts, added
                  to a residual if there is one
        It may overwrite `hidden`.
        """


class AllGatherExchange(ExpertExchange):
    """Exchange by an all-gather of rows and a reduce-scatter of results; see `ExpertExchange`.

        bound 0, rows (5, 2)     7 rows, which the host knows
        bound 8                  16 rows: those of each replica, then padding

    ep   ranks that divide the experts: those of a replica are neighbours
    tp   ranks of this replica; None: it has one
    quantize   brings x into the form in which it travels; None: it travels as it is
    """

    def __init__(self, ep: Group, tp: Group | None, quantize: Quantize | None = None) -> None:
        self._ep, self._tp, self._quantize = ep, tp, quantize
        self._each = tp.size if tp is not None else 1  # ranks of a replica
        self._replicas = ep.size // self._each
        self._replica, self._place = divmod(ep.rank, self._each)

    def run(self, routed: Rows, hidden: Tensor, experts: Experts, replicas: ReplicaTokens) -> Tensor:
        rows, count = (replicas.bound,) * self._replicas if replicas.bound else replicas.rows, len(hidden)
        found = self.combine(experts(*self.dispatch(_padded(routed, rows[self._replica]), rows), None), rows)
        return hidden + (found if len(found) == count else found[:count])

    def dispatch(self, routed: Rows, rows: Sequence[int]) -> Sent:
        """Return the rows of all replicas, in the order of replicas; `rows` has the count of each."""
        x, weights, ids = routed
        assert len(x) == rows[self._replica], f"{len(x)} rows, but the step says {rows[self._replica]}"
        own = slice(*share(len(x), self._each, self._place))
        given = weights[own], ids[own]
        if self._quantize is None:
            x, weights, ids = self._gather((x[own], *given), rows)
            return x, weights, ids
        narrow = self._quantize(x[own])
        values, scales, weights, ids = self._gather((narrow.values, narrow.scales, *given), rows)
        return QuantizedRows(values, scales, narrow.dtype), weights, ids

    def _gather(self, parts: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
        """Gather tensors with as many rows as this rank brings, in one exchange."""
        sent = [_bytes(part) for part in parts]
        got = self._ep.gather_rows(torch.cat(sent, dim=1), self._counts(rows)).split([one.shape[1] for one in sent], 1)
        return [all_.contiguous().view(part.dtype) for all_, part in zip(got, parts, strict=True)]

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


class PullExchange(ExpertExchange):
    """Exchange through symmetric memory; see `ExpertExchange`. It can be captured in a CUDA graph.

    slots   the memory of all ranks, with the form in which rows travel
    owner   [experts] int32: the rank of each expert, or of each slot if experts are balanced
    """

    def __init__(self, slots: Slots, owner: Tensor) -> None:
        from quire.kernels.comm import triton_exchange  # needs Triton, which only GPUs have

        self.slots, self.owner, self._kernels = slots, owner, triton_exchange

    def run(self, routed: Rows, hidden: Tensor, experts: Experts, replicas: ReplicaTokens) -> Tensor:
        # With more tokens than `bound` in some replica, the rows travel in several exchanges, as many on every rank.
        (x, weights, ids), each, most = routed, self.slots.each, replicas.bound
        hidden, bound = hidden.contiguous(), -(-most // each)
        for first in range(0, max(replicas.rows, default=1), bound * each):
            given = ids, replicas.count, self.owner, self.slots, bound, first
            got, got_weights, got_ids, y = self._kernels.dispatch(x, given[0], weights, *given[1:])
            y = experts(got, got_weights, got_ids, y)
            hidden = self._kernels.combine(hidden, y, *given)
        return hidden


def _padded(routed: Rows, count: int) -> Rows:
    """Return `count` rows: those of this replica, then rows without experts, which are computed nowhere."""
    x, weights, ids = routed
    lacking = count - len(x)
    if lacking <= 0:
        return routed
    return F.pad(x, (0, 0, 0, lacking)), F.pad(weights, (0, 0, 0, lacking)), F.pad(ids, (0, 0, 0, lacking), value=-1)


def _bytes(part: Tensor) -> Tensor:
    """Return the same rows as bytes. (No rows may have strides that PyTorch cannot view.)"""
    if not len(part):
        return part.new_empty(0, part.shape[1] * part.element_size(), dtype=torch.uint8)
    return part.contiguous().view(torch.uint8)


def _share(count: int, parts: int, place: int) -> int:
    first, end = share(count, parts, place)
    return end - first
