"""Layers of a decoder, of multi-token prediction (MTP) and of EAGLE heads: a mixer and a feed-forward part each."""

from collections.abc import Iterator

from quire.args.checkpoint import ModelArgs
from quire.args.eagle import EagleArgs
from quire.args.layers import NONE, LayerArgs
from quire.contracts.params import Param
from quire.plan.kinds import feed_forward, mixer, mixers
from quire.plan.kinds.interfaces import (
    LAYER_NORM,
    RMS_NORM,
    Call,
    ExchangedRows,
    LayerStep,
    ParamWriter,
    RankExchange,
    StoredRows,
)

AT = "layers.{i}."


def block_params(args: ModelArgs, write: ParamWriter, layer: int) -> Iterator[Param]:
    """Yield the parameters of a decoder layer: norm, mixer, norm, feed-forward part."""
    own = args.layers[layer]
    if own.norms == "shared":
        yield write.norm(AT + "norm.weight", layer)
    yield from _norms("attention", own, write, layer)
    yield from mixer(own.mixer).params(write, layer, args.hidden_size)
    if own.beside is not None:
        yield from mixer(own.beside).params(write, layer, args.hidden_size)
    yield from _norms("mlp", own, write, layer)
    yield from feed_forward(own.feed_forward).params(write, layer)
    if own.inputs:
        yield write.param(AT + "input.gate.weight", {"": StoredRows(own.inputs)}, write.hidden, layer=layer)
        yield write.param(AT + "input.project.weight", {"": StoredRows(write.hidden)}, own.inputs, layer=layer)
        yield write.norm(AT + "input_after.weight", layer)
    if own.scaled:
        yield write.param(AT + "factor.weight", {"": StoredRows(1)}, dtype="float32", layer=layer)


def input_params(args: ModelArgs, write: ParamWriter, vocab: StoredRows) -> Iterator[Param]:
    """Yield the parameters of the further embeddings of tokens, of which each layer has one.

    vocab   rows of this rank's slice of the vocabulary
    """
    width = args.num_layers * args.inputs
    yield write.param("inputs.embed.weight", {"": vocab}, width, shard="rows")
    yield write.param("inputs.project.weight", {"": StoredRows(width)}, write.hidden)
    yield write.norm("inputs.norm.weight", width=args.inputs)


def _norms(half: str, own: LayerArgs, write: ParamWriter, layer: int) -> Iterator[Param]:
    """Yield the norms of a half of a layer, if it has the half: before it, and of its result."""
    if (own.mixer if half == "attention" else own.feed_forward) == NONE:
        return
    for place in ("norm",) * own.before + ("after",) * own.after:
        yield write.norm(f"{AT}{half}_{place}.weight", layer)


def block_calls(args: ModelArgs, layer: int, step: LayerStep) -> Iterator[Call]:
    """Yield the kernel calls of a decoder layer, or of an MTP layer behind the last one."""
    own, drafts = args.layers[layer], layer >= args.num_layers
    step = step._replace(layer=own, norm=LAYER_NORM if args.norm.centered else RMS_NORM)
    if drafts:
        yield from (Call("norm.rms_norm", ("token_norm.weight",)), Call("norm.rms_norm", ("state_norm.weight",)))
        yield Call("linear.run", ("join.weight",))
    if own.norms == "shared":
        yield Call(step.norm, ("norm.weight",))
    if own.beside is not None:
        yield Call(step.norm, ("attention_norm.weight",))
    for place, one in enumerate(own.mixers):
        yield from mixer(one).calls(step._replace(layer=own.part(place)))
    yield from feed_forward(own.feed_forward).calls(step._replace(layer=own.part(2)))
    if own.inputs:
        yield Call("linear.run", ("input.gate.weight",))
        yield Call("activation.gated")
        yield Call("linear.run", ("input.project.weight",))
        yield Call(RMS_NORM, ("input_after.weight", *["factor.weight"] * own.scaled))
    if drafts:
        yield Call("norm.rms_norm", ("norm.weight",), "before the head, in each pass that drafts")


def layer_exchanges(layer: LayerArgs, rows: ExchangedRows) -> Iterator[RankExchange]:
    """Yield the exchanges of a layer between ranks."""
    for one in layer.mixers:
        yield from mixer(one).exchanges(rows)
    yield from feed_forward(layer.feed_forward).exchanges(rows)


def prediction_params(args: ModelArgs, write: ParamWriter, layer: int) -> Iterator[Param]:
    """Yield the parameters of an MTP layer: it joins the embedding of a token with the state of the one before."""
    yield write.norm(AT + "token_norm.weight", layer)
    yield write.norm(AT + "state_norm.weight", layer)
    yield write.param(AT + "join.weight", {"": StoredRows(write.hidden)}, 2 * write.hidden, layer=layer)
    yield from block_params(args, write, layer)
    yield write.norm(AT + "norm.weight", layer)


def head_params(args: ModelArgs, eagle: EagleArgs, write: ParamWriter, vocab: StoredRows) -> Iterator[Param]:
    """Yield the parameters of an EAGLE head; of EAGLE-3, which reads several states, also a norm, a head, and ids.

    vocab   rows of this rank's slice of the vocabulary
    """
    hidden, rows, reads = write.hidden, {"": StoredRows(write.hidden)}, len(eagle.reads(args.num_layers))
    yield write.param(AT + "join.weight", rows, (reads or 2) * hidden, layer=0)
    if eagle.bias:
        yield write.param(AT + "join.bias", rows, layer=0)
    if eagle.norms == "joined":
        yield write.norm(AT + "read_norm.weight", 0, reads * hidden)
    elif eagle.norms:
        yield write.param(AT + "read_norm.weight", {str(i): StoredRows(hidden) for i in range(reads)}, layer=0)
    for norm in ("token_norm", "state_norm") if reads else ():
        yield write.norm(f"{AT}{norm}.weight", 0)
    yield from mixer(args.layers[0].mixer).params(write, 0, 2 * hidden if reads else hidden)
    yield write.norm(AT + "mlp_norm.weight", 0)
    yield from feed_forward(args.layers[0].feed_forward).params(write, 0)
    if reads:
        yield write.norm("norm.weight")
        yield write.param("head.weight", {"": vocab}, hidden, shard="rows")
    if reads and args.vocab_size != eagle.vocab_size:
        yield write.param("ids.offsets", {"": StoredRows(args.vocab_size)}, dtype="float32")


def widest(args: ModelArgs) -> int:
    """Return the most numbers that a token has inside a layer, of all ranks, without those of routed experts."""
    inside = [mixer(one).width for one in args.mixers]
    inside += [feed_forward(one.feed_forward).width for one in set(args.layers)]
    return max(args.num_layers * args.inputs, *inside)


def score_features(args: ModelArgs) -> frozenset[str]:
    """Return the features of attention kernels that the scores of a model need."""
    return frozenset().union(*(kind.scores for kind in mixers(args)))


def operations(args: ModelArgs, blends: bool = False, adapters: bool = False) -> tuple[str, ...]:
    """Return the names of the kernel operations that a model needs, except "experts": `MoEPlan` names its kernel.

    blends     True: its KV is reused at other positions, too
    adapters   True: requests may name adapters
    """
    more = ("routing",) * (args.moe is not None) + ("blend",) * blends + ("lora",) * adapters
    return (
        "norm",
        *dict.fromkeys(name for kind in mixers(args) for name in kind.operations),
        "activation",
        "linear",
        *more,
    )
