"""The experts' exchange as one process sees it that has the rows of all ranks. See `quire.kernels.comm.exchange`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.scheme import AS_THEY_ARE, Wire
from quire.kernels.quantize.ref import quantize_rows
from quire.kernels.quantize.rows import QuantizedRows


@dataclass(frozen=True)
class Replica:
    """The rows that a replica brings to an exchange.

    x        [T, hidden];  ids  [T, k] int32;  weights  [T, k] float32
    count    number of rows that count, at most T
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    count: int


def dispatched(
    replicas: Sequence[Replica],
    owner: Tensor,
    rank: int,
    bound: int,
    each: int = 1,
    *,
    first: int = 0,
    wire: Wire = AS_THEY_ARE,
) -> tuple[Tensor | QuantizedRows, Tensor, Tensor]:
    """Return x [ranks * bound, hidden], weights and ids [.., k] that `rank` gets; rows that it does not get are zeros.

    x has the form of the wire. Arguments as those of `triton_exchange.dispatch`; `each` ranks bring a replica's rows.
    """
    (hidden, k), ranks = (replicas[0].x.shape[1], replicas[0].ids.shape[1]), len(replicas) * each
    x = replicas[0].x.new_zeros(ranks * bound, hidden)
    weights, ids = torch.zeros(ranks * bound, k), torch.full((ranks * bound, k), -1, dtype=torch.int32)
    for number, replica in enumerate(replicas):
        for row in range(min(replica.count - first, bound * each)):
            chosen = replica.ids[first + row]
            if rank in _owners(chosen, owner):
                to = (number * each + row % each) * bound + row // each
                x[to], weights[to] = replica.x[first + row], replica.weights[first + row]
                ids[to] = chosen
    return quantize_rows(x, wire) if wire.values else x, weights, ids


def combined(
    residual: Tensor,
    replicas: Sequence[Replica],
    results: Sequence[Tensor],
    owner: Tensor,
    number: int,
    bound: int,
    each: int = 1,
    *,
    first: int = 0,
) -> Tensor:
    """Return residual [T, hidden] + the results for the rows of replica `number`, in float32 and rounded once.

    results   [ranks * bound, hidden] of each rank
    """
    out, replica = residual.clone(), replicas[number]
    for row in range(min(replica.count - first, bound * each)):
        total = torch.zeros(residual.shape[1])
        for rank in sorted(_owners(replica.ids[first + row], owner)):
            total += results[rank][(number * each + row % each) * bound + row // each].float()
        out[first + row] = (total + residual[first + row].float()).to(residual.dtype)
    return out


def _owners(chosen: Tensor, owner: Tensor) -> set[int]:
    """Ranks that have an expert of a row."""
    return {int(owner[one]) for one in chosen.tolist() if one >= 0} - {-1}
