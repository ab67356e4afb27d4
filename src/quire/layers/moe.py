"""The feed-forward layer as a mixture of experts: router -> dispatcher -> experts -> combine.

One rank has every token ("none" of `config/resolve_moe.py`): nothing is dispatched, and experts of other ranks are left
out of the sum, which is then partial.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quire.config.checkpoint import ModelArgs
from quire.config.experts import Routing
from quire.kernels.linear import ref
from quire.kernels.streams import Fork, side_stream
from quire.layers.context import Build
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.quantization import unquantized

# Tokens of a step whose shared experts run beside the routed ones on a GPU. Fewer are a chain of kernels that start
# while those before them end, which a fork would break; with more, each product fills the device.
BESIDE = range(5, 257)
Routed = tuple[Tensor, Tensor]  # weights [T, k] float32, ids [T, k] int32


class Router(nn.Module):
    """Which experts compute a token: scores of all of them, and `kernels/routing`."""

    def __init__(self, hidden_size: int, routing: Routing, exact: bool, build: Build) -> None:
        super().__init__()
        self.routing, self.exact = routing, exact
        self.linear, self.kernel = build.kernels.linear, build.kernels.routing
        if exact and "exact" not in build.kernels.features("linear"):
            self.linear = ref  # few outputs, and one rounding more sends tokens to other experts
        self.weight: nn.Parameter | None = build.parameter(routing.num_experts, hidden_size)
        self.bias = build.parameter(routing.num_experts, dtype=torch.float32) if routing.bias else None
        self.packed: unquantized.PackedLinear | None = None

    def pack(self) -> None:
        """See `Linear`; the bias is no part of the product."""
        assert self.weight is not None, "packed twice"
        self.packed, self.weight = unquantized.pack(self.linear, self.weight, None), None

    def forward(self, x: Tensor) -> Routed:
        """x [T, hidden] -> weights and ids. Scores of a model with `router_float` are never rounded to its type."""
        assert self.packed is not None, "run before pack()"
        logits = (unquantized.run_float if self.exact else unquantized.run)(self.linear, x, self.packed)
        weights, ids = self.kernel.route(logits, self.bias, self.routing)
        return weights, ids


class Experts(nn.Module):
    """The experts this rank owns, stacked in the order of `Build.experts`."""

    def __init__(self, hidden_size: int, expert_size: int, num_experts: int, build: Build) -> None:
        super().__init__()
        self.kernel, self.expert_map = build.kernels.experts, None
        self.num_experts = num_experts if build.experts is None else len(build.experts)
        if build.experts is not None:
            own = {expert: place for place, expert in enumerate(build.experts)}
            places = [own.get(expert, -1) for expert in range(num_experts)]
            self.expert_map = torch.tensor(places, dtype=torch.int32, device=build.device)
        self.gate_up: nn.Parameter | None = build.parameter(self.num_experts * 2 * expert_size, hidden_size)
        self.down: nn.Parameter | None = build.parameter(self.num_experts * hidden_size, expert_size)
        self.packed: object = None

    def pack(self) -> None:
        """Reorder the weights for the kernel and free the plain ones; once, after loading."""
        assert self.gate_up is not None and self.down is not None, "packed twice"
        parts = (part.detach().unflatten(0, (self.num_experts, -1)) for part in (self.gate_up, self.down))
        self.packed, self.gate_up, self.down = self.kernel.pack(*parts), None, None

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor, residual: Tensor, *join: Callable[[], bool]) -> Tensor:
        """x [T, hidden] -> residual, perhaps in its memory, + the weighted sum over the experts of this rank."""
        y: Tensor = self.kernel.run(x, weights, ids, self.packed, self.expert_map, residual, *join)
        return y


class MoE(nn.Module):
    """hidden + the experts' weighted sum + the shared experts, one gated layer that every token goes through.

    choose       what selects in the router's place, where it is set (`quire.kernels.routing.uniform`)
    on_routing   sees weights and ids of each step, where it is set (tests, verification)
    """

    def __init__(self, args: ModelArgs, build: Build) -> None:
        super().__init__()
        moe, hidden = args.moe, args.hidden_size
        assert moe is not None
        self.router = Router(hidden, moe.routing, moe.router_float, build)
        self.experts = Experts(hidden, moe.expert_size, moe.routing.num_experts, build)
        self.shared = GatedMLP(hidden, moe.shared_size, False, build) if moe.shared_size else None
        self.shared_gate = Linear(hidden, {"": 1}, False, build) if moe.shared_gate else None
        can = build.device.type == "cuda" and "join" in build.kernels.features("experts")
        self.forks = can and self.shared is not None
        self.choose: Callable[[Tensor], Routed] | None = None
        self.on_routing: Callable[[Tensor, Tensor], None] | None = None

    def forward(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """hidden [T, hidden] -> hidden + the layer of norm(hidden), perhaps in hidden's memory."""
        x = norm(hidden)
        forks = self.forks and len(x) in BESIDE and hidden.is_contiguous()
        with Fork(side_stream(x.device) if forks else None) as fork:  # from here on the main stream reads x, not hidden
            weights, ids = (self.choose or self.router)(x)
            if self.on_routing is not None:
                self.on_routing(weights, ids)
            if self.shared is not None:
                with fork.beside:
                    inner = self.shared.gate_up(x)
                    if self.shared_gate is not None:
                        inner = inner * self.shared_gate(x).sigmoid()  # the same as of the output, and narrower
                    hidden = self.shared.down.add(inner, hidden)
            y: Tensor = self.experts(x, weights, ids, hidden, *(fork.join,) if forks else ())
        return y
