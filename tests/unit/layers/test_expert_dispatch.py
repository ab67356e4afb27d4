"""The exchange of rows by an all-gather: exact numbers of rows, or a fixed number of each replica."""

import pytest
import torch
from torch import Tensor

from quire.layers.context import ReplicaTokens
from quire.layers.expert_dispatch import AllGatherExchange

from ...support.simulated_groups import SimulatedRanks

HIDDEN, EACH = 4, 2  # experts of a rank


@pytest.mark.parametrize("bound", [0, 8])
def test_a_bound_fixes_the_rows_and_padding_has_no_experts(bound: int) -> None:
    """With it the shapes of a step are those of any other one, as a CUDA graph needs."""
    rows, seen = (3, 0), list[tuple[int, int]]()
    x = torch.arange(1.0, 1 + rows[0] * HIDDEN).view(-1, HIDDEN)
    ids = torch.tensor([[0, 3], [2, 1], [-1, -1]], dtype=torch.int32)  # the last row is padding of the step's own

    def work(group: object) -> Tensor:
        exchange = AllGatherExchange(group, None)  # type: ignore[arg-type]
        rank, count = exchange._ep.rank, rows[exchange._ep.rank]
        own = range(rank * EACH, (rank + 1) * EACH)

        def experts(got: Tensor, weights: Tensor, chosen: Tensor, residual: Tensor | None) -> Tensor:
            seen.append((len(got), int((chosen >= 0).any(1).sum())))
            here = torch.isin(chosen, torch.tensor(own))
            return (torch.where(here, (1 + chosen) * weights, 0).sum(1)[:, None] * got).contiguous()

        routed = x[:count], torch.full((count, 2), 0.5), ids[:count]
        replicas = ReplicaTokens(() if bound else rows, torch.tensor([count]), bound)
        return exchange.run(routed, x[:count].clone(), experts, replicas)

    found, none = SimulatedRanks(2).run(work)
    factors = 1 + 0.5 * torch.tensor([1.0 + 4, 3 + 2, 0])
    assert torch.equal(found, x * factors[:, None]) and not len(none)
    assert seen == [(2 * bound or sum(rows), 2)] * 2
