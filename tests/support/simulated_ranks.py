"""Ranks with experts as lists: the dispatchers of `plan/dispatchers.py` as pure functions of tensors.

Between dispatch and combine a rank calls `run` of an experts kernel, as the layer does.
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
}
