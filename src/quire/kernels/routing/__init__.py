"""Routing of tokens to experts: choice and weight of each token's k experts (formulas: `quire.args.experts.Routing`).

route(logits [T, E], correction [E] float32 or None, routing, live [T] bool or None, expert_scale [E] float32 or None)
    -> weights [T, k] float32, ids [T, k] int32
    All arithmetic is float32, for logits of any dtype. The ids of a token are k different numbers in [0, E), even if
    its logits are NaN; those of a token that is not live are -1. Does not wait for the device.

With the feature "norm of few rows":
route_normed(x [T, K], (norm's weight [K], eps), scores, routing, live) -> (norm(x) [T, K], (weights, ids)), or None
             where it has no kernel for x
    scores   `Scores`
    Softmax without a correction is chosen by logits: experts whose scores are equal in float32 may be others than those
    of `route`. If a logit is NaN, the ids are as valid as its ids, and others.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.args.experts import Routing

ZIPF = 0.7  # exponent of popularities: the middle one of the simulations in docs/many.md


class Scores(NamedTuple):
    """A router, for `route_normed`.

    weight       [E, K] as its linear kernel has packed it;  bias [E], or None
    correction   [E] float32, or None;  factors  of experts, `expert_scale`, [E] float32, or None
    exact        the logits stay float32, else they have the dtype of x
    """

    weight: Any
    bias: Tensor | None
    correction: Tensor | None
    factors: Tensor | None
    exact: bool


def uniform(kernel: ModuleType, routing: Routing, x: Tensor, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return weights and ids of k experts that are drawn at random, without repetition, for each live row of x [T, .].

    It replaces the router's choice. It uses the default generator of x's device, so a replayed CUDA graph draws anew.
    Weights are 1/k to within 1%.

    kernel   an implementation of `route`
    """
    scores = torch.empty(x.shape[0], routing.num_experts, device=x.device).uniform_(0, 0.01)
    return _chosen(kernel, routing, scores, live)


def zipf(
    kernel: ModuleType, routing: Routing, x: Tensor, live: Tensor | None = None, *, logs: Tensor
) -> tuple[Tensor, Tensor]:
    """As `uniform`, with experts drawn by their popularities. Weights differ.

    logs   [E] float32, the logarithms of the popularities
    """
    noise = torch.empty(x.shape[0], routing.num_experts, device=x.device).exponential_()
    return _chosen(kernel, routing, logs - noise.log(), live)  # the largest k are draws without repetition


def drawing(name: str, layer: int, num_experts: int, device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `uniform`, or `zipf` with popularities of Zipf's law, in an order for each layer, alike on all ranks."""
    if name == "uniform":
        return uniform
    places = torch.randperm(num_experts, generator=torch.Generator().manual_seed(layer))
    return partial(zipf, logs=(-ZIPF * (1.0 + places).log()).to(device))


def _chosen(kernel: ModuleType, routing: Routing, scores: Tensor, live: Tensor | None) -> tuple[Tensor, Tensor]:
    plain = Routing(num_experts=routing.num_experts, top_k=routing.top_k, scoring="softmax", normalize=True)
    weights, ids = kernel.route(scores, None, plain, live)
    return weights, ids
