"""Steps of a mixture of experts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire.explain.verify.recording import on_result, whole
from quire.explain.verify.step_kinds.interfaces import FeedForwardSteps, Keep, Parts
from quire.layers.moe import MoE

DOWN = (
    "mlp.shared_experts.down_proj",
    "mlp.shared_expert.down_proj",
    "feed_forward.shared_expert.down_proj",
    "shared_mlp.output_linear",
    "mixer.shared_experts.down_proj",
)
ROUTER = (
    "mlp.gate",
    "mlp.router",
    "feed_forward.router",
    "feed_forward.gate",
    "block_sparse_moe.router",
    "mixer.gate",
)
EXPERTS = ("mlp.experts", "feed_forward.experts", "block_sparse_moe.experts", "mixer.experts")


class ExpertSteps(FeedForwardSteps):
    """The steps of a router, its experts and shared experts. A `FeedForwardSteps`."""

    room = "mlp"
    paths: Mapping[str, tuple[str, ...]] = {
        "router": ROUTER,
        "experts": EXPERTS,
        "shared down_proj": DOWN,
    }
    inputs: Mapping[str, tuple[str, ...]] = {"shared gate_proj, up_proj": DOWN}

    def watch(self, layer: MoE, keep: Keep, parts: Parts) -> None:
        """Record the router's weights [T, E], the shared experts, and the sum of the routed experts."""
        experts = layer.router.routing.num_experts
        layer.forks = False  # a copy of a result would have to wait for the side stream

        def routed(weights: Tensor, ids: Tensor) -> None:
            dense, live = weights.new_zeros(len(ids), experts), ids >= 0  # rows without a draft choose none
            keep("router", dense.scatter_add_(1, ids.long().clamp(min=0), weights.where(live, 0.0)))

        def summed(module: Any, given: Any, result: Tensor) -> None:
            x, weights, ids, residual = given
            own = module.forward(x, weights, ids, torch.zeros_like(x if residual is None else residual))
            keep("experts", own if layer.tp is None else layer.tp.all_reduce(own))

        layer.on_routing = routed
        layer.experts.register_forward_hook(summed)
        if layer.shared_gate is not None:
            on_result(layer.shared_gate, keep, "shared_expert_gate")
        if layer.shared is not None:
            _watch_shared(layer.shared, keep)


def _watch_shared(shared: Any, keep: Keep) -> None:
    """Record the shared expert before a gate scales it: the gate is a step of its own."""

    def projected(module: Any, given: Any, result: Tensor) -> None:
        x, ctx = given
        keep("shared gate_proj, up_proj", whole(result, shared.down.tp))
        keep("shared down_proj", shared.down.add(result.clone(), torch.zeros_like(x), ctx))

    shared.gate_up.register_forward_hook(projected)
