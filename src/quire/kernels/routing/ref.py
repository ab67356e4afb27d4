"""Routing as the formulas read."""

import torch
from torch import Tensor

from quire.args.experts import Routing


def route(
    logits: Tensor,
    correction: Tensor | None,
    routing: Routing,
    live: Tensor | None = None,
    expert_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts from router logits; return weights and ids. See `quire.kernels.routing`."""
    logits = logits.float()
    scores = logits.softmax(1) if routing.scoring == "softmax" else logits.sigmoid()
    chosen = scores if correction is None else scores + correction
    if routing.by_logits:
        chosen = logits
    if routing.num_groups > 1:
        groups = chosen.unflatten(1, (routing.num_groups, -1))
        best = groups.topk(1 if routing.group_score == "max" else 2, 2).values.sum(2)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _largest(best, routing.top_groups), True)
        chosen = groups.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)
    ids = _largest(chosen, routing.top_k)
    weights = scores.gather(1, ids)
    if routing.normalize:
        weights = weights / (weights.sum(1, keepdim=True) + routing.normalize_eps)
    weights = weights * routing.scaling if expert_scale is None else weights * routing.scaling * expert_scale[ids]
    ids = ids.int()
    return weights, ids if live is None else ids.masked_fill(~live[:, None], -1)


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the indices [T, count] of the largest values [T, N], best first; among equals the lower index first."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]
