"""Routing on a CPU, one token at a time: PyTorch's sigmoid of a number depends on the numbers beside it."""

import torch
from torch import Tensor

from quire.args.experts import Routing
from quire.kernels.routing import ref


def route(
    logits: Tensor,
    correction: Tensor | None,
    routing: Routing,
    live: Tensor | None = None,
    expert_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts from router logits; return weights and ids. See `quire.kernels.routing`."""
    if not len(logits):
        return ref.route(logits, correction, routing, live, expert_scale)
    lives = [None] * len(logits) if live is None else live.split(1)
    found = [
        ref.route(row, correction, routing, own, expert_scale) for row, own in zip(logits.split(1), lives, strict=True)
    ]
    return torch.cat([weights for weights, _ in found]), torch.cat([ids for _, ids in found])
