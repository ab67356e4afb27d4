"""The feed-forward layer as a mixture of experts: router -> dispatcher -> experts -> combine.

With dispatcher "none" of `plan/dispatchers.py` every rank has every token. A rank's sum leaves out the experts of
other ranks and is then partial. With replicas of attention, `layers/expert_dispatch.py` brings tokens to experts and
back.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quire.args.experts import MoEArgs
from quire.kernels.expert_copies.slots import ExpertSlots
from quire.kernels.experts.form import ExpertForm
from quire.kernels.lora import AdapterRows
from quire.kernels.pack.matrix import Weight, empty_weight
from quire.kernels.quantize.rows import QuantizedRows
from quire.kernels.routing import Scores
from quire.kernels.select import load_kernel
from quire.kernels.streams import Fork, side_stream
from quire.layers.adapters import AdaptedExperts, AdaptedProduct
from quire.layers.branch import Branch
from quire.layers.context import Build, StepContext
from quire.layers.expert_dispatch import AllGatherExchange, ExpertExchange, PullExchange
from quire.layers.linear import Linear, PackedLinear, pack_linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import Norm

# Numbers of tokens with which the shared experts run on a side stream of a GPU, beside the routed experts. With fewer,
# each kernel starts while the one before it ends, which a fork would prevent; with more, each product fills the device.
BESIDE = range(5, 257)
Routed = tuple[Tensor, Tensor]  # weights [T, k] float32, ids [T, k] int32


class Router(nn.Module):
    """Scores all experts for each token; the kernel `kernels/routing` then chooses experts by the scores.

    adapted   products of adapters; None: no adapter changes the scores
    """

    packed: PackedLinear
    adapted: AdaptedProduct | None = None

    def __init__(self, at: str, moe: MoEArgs, build: Build) -> None:
        super().__init__()
        self.at, self.routing, self.exact, self.device = at, moe.routing, moe.router_float, build.device
        self.linear, self.kernel = build.linears[at].load(), build.kernels.routing
        joins = "norm" in build.linears[at].features and "norm of few rows" in build.kernels.features("routing")
        self.joins_norm = joins and not moe.router_eps
        self.norm, self.eps = build.kernels.norm, moe.router_eps
        self.correction: Tensor | None = None
        self.scale: Tensor | None = None  # of the norm, over the root of the hidden size
        self.stored: Tensor | None = None  # the same as the checkpoint has it
        self.expert_scale: Tensor | None = None

    def take(self, tensors: dict[str, Tensor], place: int) -> None:
        """Pack the weight, and move weight, bias, correction and scales to the layer's device. See `Loads`.

        The projection adds the bias to the logits, the routing kernel the correction to the scores. It multiplies
        weights by the scales of experts.
        """
        found = {name: tensors.pop(name, None) for name in ("correction", "expert_scale", "scale")}
        self.correction, self.expert_scale, scale = (
            None if one is None else one.to(self.device) for one in found.values()
        )
        self.stored = scale
        self.scale = None if scale is None else (scale.float() * len(scale) ** -0.5).to(scale.dtype)
        self.packed = pack_linear(self.linear.pack, tensors, self.device)

    def forward(self, x: Tensor, live: Tensor | None = None, adapters: AdapterRows | None = None) -> Routed:
        """Return (weights, ids) of the experts chosen for each token of x [T, hidden], both [T, top_k].

        Rows that are not `live` [T] choose none: their ids are -1. With `router_eps` x is the residual stream.
        adapters: of the rows; None: no row has one

        The scores stay float32 if the model's `router_float` is set; else they have the model's dtype.
        """
        if self.scale is not None:
            x = self.norm.rms_norm(x, self.scale, self.eps)
        logits = (self.linear.run_float if self.exact else self.linear.run)(x, *self.packed)
        if adapters is not None and self.adapted is not None:
            self.adapted.add(logits, x, adapters)
        weights, ids = self.kernel.route(logits, self.correction, self.routing, live, self.expert_scale)
        return weights, ids

    def normed(self, x: Tensor, norm: Norm, live: Tensor | None) -> tuple[Tensor, Routed] | None:
        """Return norm(x) and `forward` of it by one kernel; None: it is not for x."""
        if not self.joins_norm or norm.args.centered:
            return None
        weight, bias = self.packed
        found: tuple[Tensor, Routed] | None = self.kernel.route_normed(
            x,
            (norm.weight, norm.eps),
            Scores(weight, bias, self.correction, self.expert_scale, self.exact),
            self.routing,
            live,
        )
        return found


class Experts(nn.Module):
    """The experts that this rank owns, stacked in the order of `Build.experts`.

    A kernel with the feature "in place" reads experts as they are loaded, without packing. For other kernels, and for
    quantized or biased experts, each expert is packed.

    adapted   products of adapters; None: no adapter changes the experts
    """

    adapted: AdaptedExperts | None = None

    def __init__(self, at: str, moe: MoEArgs, build: Build) -> None:
        super().__init__()
        assert build.moe is not None
        self.at, self.device, num_experts = at, build.device, moe.routing.num_experts
        self.form = ExpertForm(moe.act, moe.biased)
        self.num_experts = num_experts if build.experts is None else len(build.experts)
        own = {name: build.params[f"{at}.{name}"] for name in ("gate_up", "down")}
        self.schemes = {name: param.scheme for name, param in own.items()}
        self.plan = build.moe.of(self.schemes["gate_up"])
        self.kernel, self.expert_map = load_kernel("experts", self.plan.experts), None
        self.in_place = "in place" in self.plan.features and not moe.biased and not any(self.schemes.values())
        self.shapes = {name: param.shape for name, param in own.items()}
        self.dtype = getattr(torch, own["down"].dtype) if own["down"].dtype else build.dtype  # of both
        if build.experts is not None:
            place_of = {expert: place for place, expert in enumerate(build.experts)}
            places = [place_of.get(expert, -1) for expert in range(num_experts)]
            self.expert_map = torch.tensor(places, dtype=torch.int32, device=build.device)
        self.packed: object = None

    def take(self, tensors: dict[str, Any], place: int) -> None:
        """Pack the matrices of this rank's expert number `place` into the stack. See `Loads`.

        Biased experts come with "gate_up_bias" [2I] and, on the first rank of those that share the expert, with
        "down_bias" [H]: the sum over ranks adds it once.
        """
        if self.packed is None:
            self.packed = self._empty()
        biases = None
        if self.form.biased:
            first, second = tensors["gate_up_bias"], tensors.get("down_bias")
            biases = first, first.new_zeros(self.shapes["down"][0] // self.num_experts) if second is None else second
        self.kernel.put(self.packed, place, tensors["gate_up"], tensors["down"], biases)

    def destination(self) -> dict[str, Tensor] | None:
        """Return the memory of all experts' parameters, for the loader to write to; None: the loader calls `take`."""
        if not self.in_place:
            return None
        if self.packed is None:
            self.packed = self._empty()
        return dict(
            zip(("gate_up", "down"), (one.flatten(0, 1) for one in self.kernel.destination(self.packed)), strict=True)
        )

    def _empty(self) -> object:
        """Allocate the packed experts; meta tensors tell the kernel the shapes of an expert."""
        return self.kernel.empty(self.num_experts, self._one("gate_up"), self._one("down"), self.device, self.form)

    def _one(self, name: str) -> Weight:
        """A matrix of an expert, without memory."""
        (rows, width), scheme = self.shapes[name], self.schemes[name]
        return empty_weight(scheme, (rows // self.num_experts, width), self.dtype, "meta")

    def forward(
        self,
        x: Tensor | QuantizedRows,
        weights: Tensor,
        ids: Tensor,
        residual: Tensor | None,
        *join: Callable[[], bool],
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        """Return residual + the weighted sum over this rank's experts, [T, hidden]; it may reuse the residual's memory.

        join       `Fork.join` of the side stream that computes the residual, if any
        adapters   of the rows; None: no row has one
        """
        if adapters is not None and self.adapted is not None:
            routed = weights, ids, self.expert_map
            step = self.adapted.of_step(adapters)
            found: Tensor = self.kernel.run_adapted(x, routed, self.packed, residual, step, *join)
            return found
        y: Tensor = self.kernel.run(x, weights, ids, self.packed, self.expert_map, residual, *join)
        return y


class MoE(nn.Module):
    """Mixture of experts: hidden + the weighted sum of routed experts + the shared experts (a gated MLP).

    slots        map of experts to slots of all ranks, if experts are balanced
    choose       replaces the router where it is set (`quire.kernels.routing.drawing`)
    on_routing   called with the weights and ids of each step where it is set (tests, verification)
    """

    def __init__(self, moe: MoEArgs, at: str, hidden_size: int, build: Build) -> None:
        super().__init__()
        assert build.moe is not None
        self.router = Router(f"{at}.router", moe, build)
        self.experts = Experts(f"{at}.experts", moe, build)
        self.shared = GatedMLP(f"{at}.shared", build, moe.act) if moe.shared_size else None
        self.shared_gate = Linear(f"{at}.shared_gate", build) if moe.shared_gate else None
        can = build.device.type == "cuda" and "join" in self.experts.plan.features
        self.tp = build.groups.tp
        self.exchange: ExpertExchange | None = None
        if build.groups.slots is not None:
            self.exchange = PullExchange(
                build.groups.slots, torch.tensor(build.owners, dtype=torch.int32, device=build.device)
            )
        elif build.groups.ep is not None:
            wire = build.moe.wire.form
            quantize = functools.partial(self.experts.kernel.quantize_rows, wire=wire) if wire.values else None
            self.exchange = AllGatherExchange(build.groups.ep, build.groups.tp, quantize)
        self.forks = can and self.shared is not None and self.tp is None and self.exchange is None
        self.weigh_inputs = moe.weigh_inputs
        assert moe.routing.top_k == 1 or not moe.weigh_inputs, "a token's experts would need inputs of their own"
        assert not (moe.router_eps and moe.shared_size), "shared experts may write over what the router reads"
        self.top_k, self.dtype, self.hidden_size = moe.routing.top_k, build.dtype, hidden_size
        self.slots: ExpertSlots | None = None
        self.choose: Callable[[Tensor, Tensor | None], Routed] | None = None
        self.on_routing: Callable[[Tensor, Tensor], None] | None = None

    def forward(self, x: Tensor, branch: Branch, ctx: StepContext, residual: Tensor | None = None) -> Tensor:
        """Return residual + moe(x) by way of `branch`, [T, hidden]; it may reuse the memory of the residual.

        residual   None: x
        """
        residual, (read, routed) = x if residual is None else residual, self._read(x, branch, ctx)
        scored = x if self.router.eps else read
        if branch.plain:
            return self.added(read, scored, residual, ctx, routed)
        return branch.join(self.added(read, scored, torch.zeros_like(residual), ctx, routed), residual)

    def _read(self, x: Tensor, branch: Branch, ctx: StepContext) -> tuple[Tensor, Routed | None]:
        """Return the input of the half, and its experts where one kernel computes both."""
        found, alone = None, ctx.apart or ctx.adapters is not None or self.choose is not None
        if branch.before is not None and not alone:
            found = self.router.normed(x, branch.before, ctx.live)
        return (branch.read(x), None) if found is None else found

    def added(
        self, x: Tensor, scored: Tensor, hidden: Tensor, ctx: StepContext, routed: Routed | None = None
    ) -> Tensor:
        """Return hidden + moe(x), [T, hidden]; it may reuse the memory of `hidden`.

        scored   what the router reads;  routed  what it has chosen; None: the router is called
        """
        forks = self.forks and len(x) in BESIDE and hidden.is_contiguous()
        with Fork(side_stream(x.device) if forks else None) as fork:  # from here on the main stream reads x, not hidden
            weights, ids = self._choice(scored, ctx) if routed is None else routed
            if self.on_routing is not None:
                self.on_routing(weights, ids)
            if self.slots is not None:
                ids = self.slots.take(ids)
            own = x  # the experts' input
            if self.weigh_inputs:
                own, weights = x * weights.to(x.dtype), torch.ones_like(weights)
            if self.exchange is not None:
                assert ctx.replicas is not None, "a step of replicas in lock-step says how many tokens each has"
                if self.shared is not None:
                    hidden = self.shared.down.add(self._shared_inner(self.shared, x, ctx), hidden, ctx)
                return self.exchange.run((own, weights, ids), hidden, self.experts, ctx.replicas)
            if self.tp is not None:  # one sum of both kinds of experts
                partial = (
                    None if self.shared is None else self.shared.down(self._shared_inner(self.shared, x, ctx), ctx)
                )
                return self.tp.add(self.experts(own, weights, ids, partial, adapters=ctx.adapters), hidden)
            if self.shared is not None:
                with fork.beside:
                    hidden = self.shared.down.add(self._shared_inner(self.shared, x, ctx), hidden, ctx)
            return self.experts(own, weights, ids, hidden, *(fork.join,) if forks else (), adapters=ctx.adapters)

    def join(self, ctx: StepContext) -> None:
        """Take part in a step in which this replica has no tokens: run this rank's experts for the other replicas."""
        assert self.exchange is not None and ctx.replicas is not None, "no other replica needs these experts"
        device = self.experts.device
        x = torch.empty(0, self.hidden_size, dtype=self.dtype, device=device)
        weights = torch.empty(0, self.top_k, device=device)
        ids = torch.empty(0, self.top_k, dtype=torch.int32, device=device)
        self.exchange.run((x, weights, ids), x, self.experts, ctx.replicas)

    def balance(self, slots: ExpertSlots, own: range, num_slots: int) -> None:
        """Let experts move between ranks. Called before the first step.

        own   the slots of this rank, of `num_slots` of all ranks
        """
        self.slots = slots
        places = torch.full((num_slots,), -1, dtype=torch.int32)
        places[own.start : own.stop] = torch.arange(len(own), dtype=torch.int32)
        self.experts.expert_map = places.to(self.experts.device)  # from now on of slots
        if isinstance(self.exchange, PullExchange):
            self.exchange.owner = (torch.arange(num_slots, dtype=torch.int32) // len(own)).to(self.experts.device)

    def _choice(self, scored: Tensor, ctx: StepContext) -> Routed:
        """Return the weights and ids of the experts of each token."""
        if self.choose is not None:
            return self.choose(scored, ctx.live)
        routed: Routed = self.router(scored, ctx.live, ctx.adapters)
        return routed

    def _shared_inner(self, shared: GatedMLP, x: Tensor, ctx: StepContext) -> Tensor:
        """The input of the shared experts' last projection."""
        inner: Tensor = shared.gate_up(x, ctx)
        if self.shared_gate is not None:
            inner = inner * self.shared_gate(x, ctx).sigmoid()  # as good as to scale the output, and narrower
        return inner
