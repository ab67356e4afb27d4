"""The kernel functions that a model calls, in order, and its exchanges with other ranks. No torch.

Mirrors the branches of `layers/`, which depend on the features of each linear layer's kernel (`linear`). A test
compares the list with the calls of a real step.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from math import isfinite
from typing import NamedTuple

from quire.args.checkpoint import ModelArgs

SUM = "tp.all_reduce"  # over the ranks that share a layer; then the residual is added
Features = Callable[[str], Collection[str]]  # a linear layer, below the layer ("mlp.down") -> features of its kernel


class Call(NamedTuple):
    """A call of a kernel function, or an exchange between ranks.

    function     operation and function ("linear.run"), or group of ranks and exchange ("tp.all_reduce")
    parameters   parameters that the call reads; names without the layer's, such as "attention.qkv.weight"
    when         condition of the call, in words; "": always
    """

    function: str
    parameters: tuple[str, ...] = ()
    when: str = ""


def pack_function(args: ModelArgs, name: str, linear: Features, in_place: bool) -> str:
    """Return the name of the function that packs parameter `name`, such as "linear.pack"; "" if it is not packed.

    linear     features of the kernel of each linear layer, by the layer's name
    in_place   True: experts are loaded into the kernel's memory without packing
    """
    if name.endswith((".experts.gate_up", ".experts.down")):
        return "" if in_place else "experts.put"
    if name.endswith(".router.weight"):
        return "linear.pack"
    if name.endswith(("norm.weight", ".head_norm.q", ".head_norm.k", ".kv_up.weight", "bias")):
        return ""
    if name == "embed.weight" and not args.tie_word_embeddings:
        return ""
    gated = name.endswith("gate_up.weight") and "gated" in linear(name.rpartition(".")[0])
    return "linear.pack_gated" if gated else "linear.pack"


def embedding_calls(args: ModelArgs, linear: Features, sliced: bool = False) -> Iterator[Call]:
    """Yield the calls of the embedding, from token ids to hidden states.

    linear   name of a linear layer -> features of its kernel
    sliced   True: each rank has some of the embedding's rows, and the results are summed over ranks
    """
    rows = "plain" in linear("embed") or args.tie_word_embeddings and "rows" in linear("embed")
    yield Call("linear.rows" if rows else "torch.nn.functional.embedding", ("embed.weight",))
    if sliced:
        yield Call(SUM)


def head_calls(args: ModelArgs, sliced: bool = False) -> Iterator[Call]:
    """Yield the kernel calls of the final norm and the head, from hidden states of the sampled rows to logits.

    sliced   each rank has the logits of some ids, and sampling exchanges them
    """
    yield Call("norm.rms_norm", ("norm.weight",))
    yield Call("linear.run_float", ("embed.weight" if args.tie_word_embeddings else "head.weight",))
    if sliced:
        yield Call("tp.all_gather", when="best ids, or logits")


def layer_calls(
    args: ModelArgs,
    layer: int,
    linear: Features,
    routing: str = "model",
    *,
    sliced: bool = False,
    spread: Mapping[str, str] | None = None,
) -> Iterator[Call]:
    """Yield the kernel calls of decoder layer number `layer`, for `explain`: attention, then an MLP or experts.

    linear    name of a linear layer -> features of its kernel, which say what it fuses into one call
    routing   the option `routing`: "model", or "uniform" and "zipf", which draw experts and call no router
    sliced    each rank has a slice of the layer: results of attention and of the MLP are summed over ranks
    spread    phase -> name of the dispatcher that brings tokens to the experts of other replicas; None: none does
    """
    drafts = layer >= args.num_layers
    if drafts:
        yield from (Call("norm.rms_norm", ("token_norm.weight",)), Call("norm.rms_norm", ("state_norm.weight",)))
        yield Call("linear.run", ("join.weight",))
    if args.latent:
        yield from _latent(args, linear)
    else:
        yield from _normed("attention_norm.weight", _weights("attention.qkv", args.attention_bias), linear)
        yield Call("heads.prepare", ("attention.head_norm.q", "attention.head_norm.k") if args.qk_norm else ())
        yield Call("attention.paged_attention")
    yield from _add("attention.output", args.output_bias, linear, sliced)
    if args.has_experts(layer):
        yield from _experts(args, linear, routing, sliced, spread or {})
    else:
        yield from _gated("mlp.", args.mlp_bias, linear, "mlp_norm.weight")
        yield from _add("mlp.down", args.mlp_bias, linear, sliced)
    if drafts:
        yield Call("norm.rms_norm", ("norm.weight",), "before the head, in each pass that drafts")


def _latent(args: ModelArgs, linear: Features) -> Iterator[Call]:
    sizes = args.latent
    assert sizes is not None
    yield from _normed("attention_norm.weight", ("attention.down.weight",), linear)
    if sizes.q_rank:
        yield from _normed("attention.q_norm.weight", ("attention.q.weight",), linear)
    yield Call("latent.prepare", ("attention.kv_norm.weight",))
    few, many = (f"{than} {sizes.break_even:.0f} query tokens per sequence" for than in ("up to", "more than"))
    if not isfinite(sizes.break_even):
        few = many = ""
    up = Call("latent.project", ("attention.kv_up.weight",), few)
    yield from (up, Call("latent.absorbed", when=few), up)  # keys into queries, values out of sums
    if many:
        yield Call("latent.expanded", up.parameters, many)


def _experts(
    args: ModelArgs, linear: Features, routing: str, sliced: bool, spread: Mapping[str, str]
) -> Iterator[Call]:
    moe = args.moe
    assert moe is not None
    yield Call("norm.rms_norm", ("mlp_norm.weight",))
    if routing != "model":
        yield Call(f"quire.kernels.routing.{routing}")
    else:
        yield Call("linear.run_float" if moe.router_float else "linear.run", ("mlp.router.weight",))
        yield Call("routing.route", ("mlp.router.bias",) if moe.routing.bias else ())
    run = Call("experts.run", ("mlp.experts.gate_up", "mlp.experts.down"))
    shared = tuple(_shared(args, linear, sliced))
    if spread:  # shared experts first: their result goes into the residual, and does not travel
        summed = (Call(SUM),) if sliced and shared else ()
        ways = (_way(spread, sliced, to_experts=there) for there in (True, False))
        yield from (*shared, *summed, *next(ways), run, *next(ways))
        return
    yield from (*shared, run)
    if sliced:  # once for both kinds of experts
        yield Call(SUM)


def _way(spread: Mapping[str, str], sliced: bool, *, to_experts: bool) -> Iterator[Call]:
    """The exchanges between replicas on the way to experts, or back."""
    for dispatcher in dict.fromkeys(spread.values()):
        phases = [phase for phase, name in spread.items() if name == dispatcher]
        there, back = ("all_gather", "reduce_scatter") if dispatcher == "all-gather" else (dispatcher, dispatcher)
        when = phases[0] if len(phases) < len(spread) else ""
        yield Call(f"ep.{there if to_experts else back}", when=when)
        if dispatcher == "all-gather" and sliced and not to_experts:
            yield Call("tp.all_gather", when=when)


def _shared(args: ModelArgs, linear: Features, partial: bool) -> Iterator[Call]:
    """The calls of the shared experts; `partial`: their result is summed over ranks with that of the routed ones."""
    moe = args.moe
    assert moe is not None
    if moe.shared_size:
        yield from _gated("mlp.shared.", False, linear)
        if moe.shared_gate:
            yield Call("linear.run", ("mlp.shared_gate.weight",))
        yield _product("mlp.shared.down", False, () if partial else linear("mlp.shared.down"))


def _weights(name: str, bias: bool) -> tuple[str, ...]:
    return (f"{name}.weight", f"{name}.bias") if bias else (f"{name}.weight",)


def _normed(norm: str, weights: tuple[str, ...], linear: Features, run: str = "") -> Iterator[Call]:
    """A norm and the projection of its result; `run`: "", or "_gated"."""
    if "norm" in linear(weights[0].rpartition(".")[0]):
        yield Call(f"linear.run_norm{run}", (norm, *weights))
    else:
        yield from (Call("norm.rms_norm", (norm,)), Call(f"linear.run{run}", weights))


def _gated(at: str, bias: bool, linear: Features, norm: str = "") -> Iterator[Call]:
    """The projection to gate and up with its activation, after a norm if there is one."""
    weights, run = _weights(f"{at}gate_up", bias), "_gated" if "gated" in linear(f"{at}gate_up") else ""
    product = Call(f"linear.run{run}", weights)
    if norm and run:
        yield from _normed(norm, weights, linear, run)
    else:
        yield from (Call("norm.rms_norm", (norm,)), product) if norm else (product,)
    if not run:
        yield Call("activation.silu_mul")


def _add(name: str, bias: bool, linear: Features, sliced: bool) -> Iterator[Call]:
    """A projection whose result is added to the residual stream; the slices of ranks are summed before."""
    yield _product(name, bias, () if sliced else linear(name))
    if sliced:
        yield Call(SUM)


def _product(name: str, bias: bool, features: Collection[str]) -> Call:
    return Call("linear.run_add" if "add" in features else "linear.run", _weights(name, bias))
