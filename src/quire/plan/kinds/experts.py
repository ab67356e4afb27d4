"""A mixture of experts: a router chooses k experts for each token; shared experts compute every token."""

from collections.abc import Iterator

from quire.args.experts import MoEArgs
from quire.args.layers import DenseArgs
from quire.contracts.params import Param
from quire.plan.kinds.dense import DenseKind, gated
from quire.plan.kinds.interfaces import (
    CHOICE_BYTES,
    RMS_NORM,
    SUM,
    TOKEN,
    Call,
    ExchangedRows,
    LayerStep,
    ParamWriter,
    RankExchange,
    StoredRows,
    joined,
    product,
    weights,
)
from quire.plan.kinds.stored_experts import StoredExperts

AT = "layers.{i}.mlp."
SHARED = "token of its share"  # each rank of a replica brings an equal part of the replica's tokens
EVERY = "token of all replicas"
CROSSING = "token and rank with an expert of it"
# Phases of the dispatchers -> the steps in which replicas in lock-step exchange tokens. A replica without tokens joins.
WHEN = {
    ("prefill", "decode"): "a replica has tokens",
    ("prefill",): "a replica has a prompt",
    ("decode",): "no replica has a prompt",
}


class ExpertsKind:
    """A mixture of experts; a `FeedForward`."""

    def __init__(self, args: MoEArgs) -> None:
        self._moe = args

    @property
    def width(self) -> int:
        """Numbers between gate and down of the shared experts; see `MoEPlan` for those of the others."""
        return self._moe.shared_size

    def params(self, write: ParamWriter, layer: int) -> Iterator[Param]:
        """Yield the router, the stacked experts of the rank, the shared experts and their gate."""
        moe, hidden, num = self._moe, write.hidden, self._moe.routing.num_experts
        yield write.param(AT + "router.weight", {"": StoredRows(num)}, hidden, layer=layer)
        if moe.routing.logit_bias:
            yield write.param(AT + "router.bias", {"": StoredRows(num)}, layer=layer)
        if moe.routing.correction:
            yield write.param(AT + "router.correction", {"": StoredRows(num)}, dtype="float32", layer=layer)
        if moe.routing.expert_scale:
            yield write.param(AT + "router.expert_scale", {"": StoredRows(num)}, dtype="float32", layer=layer)
        if moe.router_eps:
            yield write.norm(AT + "router.scale", layer)
        experts = StoredExperts(write, moe, layer)
        yield experts.gate_up("gate_up", hidden)
        yield experts.down("down")
        if moe.biased:
            yield experts.gate_up("gate_up_bias")
        if moe.biased and (write.rank.whole_experts or write.rank.place == 0):  # once in the sum of the ranks
            yield experts.down("down_bias", bias=True)
        if moe.shared_size:
            yield from DenseKind(DenseArgs(width=moe.shared_size, act=moe.act), "mlp.shared.").params(write, layer)
        if moe.shared_gate:
            yield write.param(AT + "shared_gate.weight", {"": StoredRows(1)}, hidden, layer=layer)

    def calls(self, step: LayerStep) -> Iterator[Call]:
        """Yield norm, router, experts and shared experts, with the exchanges between ranks and replicas."""
        if step.before:
            yield Call(step.norm, ("mlp_norm.weight",))
        yield from self.routed(step)
        yield from joined("mlp", step)

    def routed(self, step: LayerStep) -> Iterator[Call]:
        """Yield the same calls without the norms around them."""
        moe = self._moe
        if step.routing != "model":
            yield Call(f"quire.kernels.routing.{step.routing}")
        else:
            run = "linear.run_float" if moe.router_float else "linear.run"
            if moe.router_eps:
                yield Call(RMS_NORM, ("mlp.router.scale",))
            yield Call(run, weights("mlp.router", moe.routing.logit_bias))
            beside = {"correction": moe.routing.correction, "expert_scale": moe.routing.expert_scale}
            yield Call("routing.route", tuple(f"mlp.router.{name}" for name, has in beside.items() if has))
        names = ("mlp.experts.gate_up", "mlp.experts.down")
        experts = Call("experts.run", (*names, *(f"{name}_bias" for name in names if moe.biased)))
        shared = tuple(self._shared(step))
        if step.spread:  # shared experts first: their result goes into the residual, and does not travel
            summed = (Call(SUM),) if step.sliced and shared else ()
            ways = (_way(step, to_experts=there) for there in (True, False))
            yield from (*shared, *summed, *next(ways), experts, *next(ways))
            return
        yield from (*shared, experts)
        if step.sliced:  # once for both kinds of experts
            yield Call(SUM)

    def exchanges(self, rows: ExchangedRows) -> Iterator[RankExchange]:
        """Yield the sum of its outputs, or the ways of rows to the experts of other replicas and back."""
        if not rows.parallel.lockstep:
            yield from rows.summed("feed-forward output")
            return
        if self._moe.shared_size:
            yield from rows.summed("output of shared experts")
        for dispatcher in dict.fromkeys(rows.spread.values()):
            when = WHEN[tuple(phase for phase, name in rows.spread.items() if name == dispatcher)]
            for one in self._between_replicas(rows, dispatcher):
                yield one._replace(when=when)

    def _between_replicas(self, rows: ExchangedRows, dispatcher: str) -> Iterator[RankExchange]:
        """Yield the exchanges of rows between replicas; see `quire.layers.expert_dispatch`."""
        row, sent = rows.num_bytes, rows.wire.row_bytes(rows.hidden, rows.item_bytes)
        top_k, own = self._moe.routing.top_k, SHARED if rows.parallel.tp > 1 else TOKEN
        choices = CHOICE_BYTES * top_k
        to_experts, back = "tokens to experts" + f" {rows.wire}" * bool(rows.wire.values), "experts' outputs back"
        if dispatcher == "all-gather":
            yield RankExchange("all-gather", f"{to_experts}, with ids and weights", "ep", sent + choices, own)
            yield RankExchange("reduce-scatter", back, "ep", row, EVERY)
            if rows.parallel.tp > 1:
                yield RankExchange("all-gather", "outputs of the replica's tokens", "tp", row, own)
        else:
            yield RankExchange("pull", "ids and weights of experts", "ep", choices, own)
            yield RankExchange("pull", to_experts, "ep", sent, CROSSING)
            yield RankExchange("pull", back, "ep", row, CROSSING)

    def _shared(self, step: LayerStep) -> Iterator[Call]:
        """Yield the calls of the shared experts. A sliced result is summed over ranks with that of the routed ones."""
        if self._moe.shared_size:
            yield from gated("mlp.shared.", False, step, act=self._moe.act)
            if self._moe.shared_gate:
                yield Call("linear.run", ("mlp.shared_gate.weight",))
            yield product("mlp.shared.down", False, () if step.sliced else step.linear("mlp.shared.down"))


def _way(step: LayerStep, *, to_experts: bool) -> Iterator[Call]:
    """Yield the exchanges between replicas on the way to experts, or back."""
    for dispatcher in dict.fromkeys(step.spread.values()):
        phases = [phase for phase, name in step.spread.items() if name == dispatcher]
        there, back = ("all_gather", "reduce_scatter") if dispatcher == "all-gather" else (dispatcher, dispatcher)
        when = "" if len(phases) > 1 else phases[0]
        yield Call(f"ep.{there if to_experts else back}", when=when)
        if dispatcher == "all-gather" and step.sliced and not to_experts:
            yield Call("tp.all_gather", when=when)
