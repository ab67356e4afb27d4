"""The experts' exchange as one process sees it that has the rows of all ranks. See `quire.kernels.comm.exchange`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.comm.exchange import GROUP
from quire.kernels.quantize import ref as quantize


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


def dispatched(replicas: Sequence[Replica], owner: Tensor, rank: int, bound: int, each: int = 1, *, first: int = 0,
               wire: str = "plain") -> tuple[Tensor, Tensor, Tensor]:
    """Return x [ranks * bound, hidden], weights and ids [.., k] that `rank` gets; rows that it does not get are zeros.

    Arguments as those of `triton_exchange.dispatch`; `each` ranks bring the rows of a replica.
    """
    (hidden, k), ranks = (replicas[0].x.shape[1], replicas[0].ids.shape[1]), len(replicas) * each
    x = replicas[0].x.new_zeros(ranks * bound, hidden)
    weights, ids = torch.zeros(ranks * bound, k), torch.full((ranks * bound, k), -1, dtype=torch.int32)
    for number, replica in enumerate(replicas):
        for row in range(min(replica.count - first, bound * each)):
            chosen = replica.ids[first + row]
            if rank in _owners(chosen, owner):
                to = (number * each + row % each) * bound + row // each
                x[to] = sent(replica.x[first + row : first + row + 1], wire)[0]
                weights[to], ids[to] = replica.weights[first + row], chosen
    return x, weights, ids


def combined(residual: Tensor, replicas: Sequence[Replica], results: Sequence[Tensor], owner: Tensor, number: int,
             bound: int, each: int = 1, *, first: int = 0) -> Tensor:  # fmt: skip
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


def sent(x: Tensor, wire: str) -> Tensor:
    """Return x [T, hidden] as it arrives over a wire."""
    if wire == "fp8":
        values, scales = quantize.fp8_groups(x)
        return (values.float() * scales.repeat_interleave(GROUP, 1)).to(x.dtype)
    if wire == "int8":
        values, scales = quantize.int8_tokens(x)
        return (values.float() * scales).to(x.dtype)
    return x


def _owners(chosen: Tensor, owner: Tensor) -> set[int]:
    """Ranks that have an expert of a row."""
    return {int(owner[one]) for one in chosen.tolist() if one >= 0} - {-1}
