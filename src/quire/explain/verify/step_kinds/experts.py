"""Steps of a mixture of experts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire.explain.verify.recording import on_result
from quire.explain.verify.step_kinds.interfaces import Keep
from quire.layers.context import StepContext
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


class ExpertSteps:
    """The steps of a router, its experts and shared experts. A `FeedForwardSteps`."""

    room = "mlp"
    paths: Mapping[str, tuple[str, ...]] = {
        "router": ROUTER,
        "experts": EXPERTS,
        "shared down_proj": DOWN,
    }
    inputs: Mapping[str, tuple[str, ...]] = {"shared gate_proj, up_proj": DOWN}

    def watch(self, layer: MoE, keep: Keep) -> None:
        """Record the router's weights [T, E], the shared experts, and the sum of the routed experts."""
        experts = layer.router.routing.num_experts

        def routed(weights: Tensor, ids: Tensor) -> None:
            keep("router", weights.new_zeros(len(ids), experts).scatter_(1, ids.long(), weights))

        def summed(module: Any, given: Any, result: Tensor) -> None:
            x, weights, ids, residual = given
            keep("experts", module.forward(x, weights, ids, torch.zeros_like(residual)))

        layer.on_routing = routed
        layer.experts.register_forward_hook(summed)
        if layer.shared_gate is not None:
            on_result(layer.shared_gate, keep, "shared_expert_gate")
        if layer.shared is not None:
            _watch_shared(layer.shared, keep)


def _watch_shared(shared: Any, keep: Keep) -> None:
    """Record the shared expert before a gate scales it: the gate is a step of its own."""
    add = shared.down.add
    inner: list[Tensor] = []

    def projected(module: Any, given: Any, result: Tensor) -> None:
        inner[:] = [result]
        keep("shared gate_proj, up_proj", result)

    def tapped(x: Tensor, residual: Tensor, ctx: StepContext) -> Tensor:
        keep("shared down_proj", add(inner[0].clone(), torch.zeros_like(residual), ctx))
        result: Tensor = add(x, residual, ctx)
        return result

    shared.gate_up.register_forward_hook(projected)
    shared.down.add = tapped
