"""Ranks with experts as lists: the dispatchers of `plan/dispatchers.py` as pure functions of tensors.

What a rank does between them is what the layer does: `run` of an experts kernel, or `run_grouped` for grouped rows.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quire.contracts.parallel import share

Tokens = list[tuple[Tensor, Tensor, Tensor]]  # of each rank: x [T, H], weights [T, k], ids [T, k]


def owned(num_experts: int, ranks: int) -> list[list[int]]:
    """The experts of each rank."""
    return [list(range(*share(num_experts, ranks, rank))) for rank in range(ranks)]


def expert_map(num_experts: int, own: list[int]) -> Tensor:
    """The place of each expert on a rank, -1: it has it not."""
    places = torch.full((num_experts,), -1, dtype=torch.int32)
    places[own] = torch.arange(len(own), dtype=torch.int32)
    return places


def no_dispatch(tokens: Tokens, packed: list[object], owners: list[list[int]], kernel: ModuleType) -> list[Tensor]:
    """Every rank has all tokens; the caller sums."""
    together = tuple(map(torch.cat, zip(*tokens, strict=True)))
    total: Any = sum(_partial(together, one, own, owners, kernel) for one, own in zip(packed, owners, strict=True))
    return list(total.split([len(x) for x, *_ in tokens]))


def all_gather(tokens: Tokens, packed: list[object], owners: list[list[int]], kernel: ModuleType) -> list[Tensor]:
    """Tokens go to all ranks; each gets the sum for its own back (reduce-scatter)."""
    gathered = [tuple(map(torch.cat, zip(*tokens, strict=True))) for _ in owners]
    partial = [_partial(*each, owners, kernel) for each in zip(gathered, packed, owners, strict=True)]
    ends = torch.tensor([len(x) for x, *_ in tokens]).cumsum(0).tolist()
    sums: list[Any] = [sum(y[end - len(x) : end] for y in partial) for end, (x, *_) in zip(ends, tokens, strict=True)]
    return sums


def all_to_all(tokens: Tokens, packed: list[object], owners: list[list[int]], kernel: ModuleType) -> list[Tensor]:
    """A row for each token and expert goes to the expert's rank, sorted by expert there; what comes back is weighed and
    summed over k by who sent it."""
    results = [torch.zeros(len(x), ids.shape[1], x.shape[1]) for x, _, ids in tokens]
    for one, own in zip(packed, owners, strict=True):
        sent = [
            (sender, *pair, expert)
            for expert in own
            for sender, (*_, ids) in enumerate(tokens)
            for pair in (ids == expert).nonzero().tolist()
        ]
        rows = torch.stack([tokens[sender][0][t] for sender, t, *_ in sent] or [tokens[0][0].new_empty(0)])
        rows = rows.view(len(sent), tokens[0][0].shape[1])
        ends = torch.tensor([sum(row[3] <= expert for row in sent) for expert in own], dtype=torch.int32)
        for (sender, t, j, _), y in zip(sent, kernel.run_grouped(rows, ends, one), strict=True):
            results[sender][t, j] = y
    return [(weights[:, :, None] * y).sum(1).to(x.dtype) for (x, weights, _), y in zip(tokens, results, strict=True)]


def _partial(
    tokens: tuple[Tensor, ...], packed: object, own: list[int], owners: list[list[int]], kernel: ModuleType
) -> Tensor:
    x, weights, ids = tokens
    places = expert_map(sum(map(len, owners)), own)
    y: Tensor = kernel.run(x, weights, ids, packed, places)
    return y


SIMULATED: dict[str, Callable[[Tokens, list[object], list[list[int]], ModuleType], list[Tensor]]] = {
    "none": no_dispatch,
    "all-gather": all_gather,
    "all-to-all": all_to_all,
}
