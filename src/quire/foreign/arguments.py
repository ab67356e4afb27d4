"""An inspected decoder of transformers as the arguments of a model, from which all plans are made."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from quire.args.checkpoint import ModelArgs
from quire.args.experts import Routing
from quire.args.foreign import (
    ForeignEnds,
    ForeignGate,
    ForeignLeaf,
    ForeignLinear,
    ForeignNorm,
    ForeignRows,
    ForeignTensor,
)
from quire.args.layers import (
    NONE,
    EndArgs,
    ForeignArgs,
    ForeignExpertsArgs,
    GroupedArgs,
    LayerArgs,
    NoneArgs,
    NormArgs,
    ScoreArgs,
)
from quire.args.rope import UNROTATED
from quire.foreign.halves import Half
from quire.foreign.head import fitted_head
from quire.foreign.heads import ProvenHeads, Side
from quire.foreign.inspect import Inspected, Kind
from quire.foreign.leaves import EXPERTS, LINEAR, NORM, Leaf, experts_form, norm_form, norm_width
from quire.foreign.names import expert_names
from quire.foreign.numbers import NotEvaluated, ancestors, evaluate, inputs_of, named_values, outputs_of
from quire.foreign.rewrite import left_operations, only_views
from quire.foreign.skeleton import Skeleton, refused
from quire.foreign.trace import TracedGraph, key_of, kind_of, prefix_of

RESERVED = ("hidden", "positions")  # inputs of graphs that are no parameters, beside extra1, extra2, ...
QKV = "attention.qkv"  # name of the fused projection of a prepared layer
Stored = Callable[[str], str]  # name of a module or parameter of transformers -> its name in the checkpoint


def model_args(
    raw: Mapping[str, Any], found: Inspected, stored: Stored, dtype: str, notes: Sequence[str] = ()
) -> ModelArgs:
    """Return the arguments of an inspected model.

    stored   see `Stored`
    dtype    of the stored weights by config.json
    Raises `UnsupportedModel` for ends of a model that Quire does not have.
    """
    config, skeleton = found.skeleton.config, found.skeleton
    embed, head = skeleton.base.get_input_embeddings(), skeleton.model.get_output_embeddings()
    if head is None or head.in_features != config.hidden_size or embed.embedding_dim != config.hidden_size:
        raise refused(dict(raw), "its embedding or its head has another width than its hidden states")
    if head.out_features != embed.num_embeddings:
        raise refused(dict(raw), f"its embedding has {embed.num_embeddings} ids, and its head {head.out_features}")
    scale, cap = fitted_head(dict(raw), skeleton)
    kinds = [_layer(found, kind, number, stored) for number, kind in enumerate(found.kinds)]
    numbers = {layer: number for number, kind in enumerate(found.kinds) for layer in kind.layers}
    tied = _is_tied(dict(raw), skeleton, f"{skeleton.names[head]}.weight", f"{skeleton.names[embed]}.weight")
    if tied and head.bias is not None:
        raise refused(dict(raw), "its head has a bias and the weights of the embedding")
    end, factor = _end(found, stored), _entry_factor(found)
    return ModelArgs(
        model_type=str(raw.get("model_type")),
        architecture=type(skeleton.model).__name__,
        vocab_size=embed.num_embeddings,
        hidden_size=config.hidden_size,
        layers=tuple(kinds[numbers[layer]] for layer in range(len(skeleton.layers))),
        norm=NormArgs(eps=end.eps, plus_one=end.plus_one, centered=end.centered),
        tie_word_embeddings=tied,
        max_position_embeddings=_context(raw, config),
        dtype=dtype,
        ends=EndArgs(embedding_scale=factor or 1.0, logit_scale=scale, logit_cap=cap),
        foreign=_ends(found, stored, end, kinds, plain=factor is not None),
        notes=tuple(notes),
    )


def _is_tied(raw: dict[str, Any], skeleton: Skeleton, head: str, embed: str) -> bool:
    """Return True if the head has the weights of the embedding. Raises `UnsupportedModel` for other shared weights."""
    ties = dict(skeleton.model.all_tied_weights_keys)
    tied = ties.pop(head, None) == embed or ties.pop(embed, None) == head
    if ties:
        raise refused(raw, f"weights are shared: {', '.join(f'{one} and {other}' for one, other in ties.items())}")
    return tied


def _context(raw: Mapping[str, Any], config: Any) -> int:
    """Return the positions that the model has: with YaRN those of the extended context."""
    found = getattr(config, "max_position_embeddings", None)
    if type(found) is not int or found <= 0:
        raise refused(dict(raw), "config.json does not say how many positions it has (max_position_embeddings)")
    return found


def _entry_factor(found: Inspected) -> float | None:
    """Return the number by which embeddings are multiplied; None: the operations behind the embedding do more."""
    hidden, *_ = outputs_of(found.entry)
    given = inputs_of(found.entry)["hidden"]
    x = torch.randn(1, 3, given.meta["val"].shape[2], generator=torch.Generator().manual_seed(6))
    at = named_values(found.entry, {"hidden": x, "positions": torch.tensor([[0, 3, 9]])})
    try:
        (out,) = evaluate([hidden], at)
    except NotEvaluated:
        return None
    factor = float((out * x).sum() / x.square().sum())
    factor = 1.0 if abs(factor - 1) < 1e-6 else factor
    return factor if out.shape == x.shape and torch.allclose(out, x * factor, rtol=1e-5, atol=1e-6) else None


def _ends(
    found: Inspected, stored: Stored, end: ForeignNorm, kinds: Sequence[LayerArgs], *, plain: bool
) -> ForeignEnds:
    """Return the ends. plain: what is behind the embedding is a factor."""
    import transformers

    skeleton = found.skeleton
    base = prefix_of(skeleton, skeleton.base)
    embed, head = skeleton.base.get_input_embeddings(), skeleton.model.get_output_embeddings()
    (hidden, *_) = outputs_of(found.entry)
    used = set[fx.Node]() if plain else ancestors([hidden], [])
    leaves = [
        leaf_args(leaf, base + leaf.name, stored, width=_width_of(found.entry, key))
        for key, leaf in enumerate(found.entry.leaves)
        if any(kind_of(node) and key_of(node) == key for node in used)
    ]
    leaves += _tensors(found, found.entry, used, base, stored)
    operations = [
        str(getattr(node.target, "overloadpacket", node.target))
        for node in found.entry.graph.nodes
        if node in used and node.op == "call_function"
    ]
    return ForeignEnds(
        module=type(skeleton.model).__module__,
        version=transformers.__version__,
        embed=stored(skeleton.names[embed] + ".weight").removesuffix(".weight"),
        head=stored(skeleton.names[head] + ".weight").removesuffix(".weight"),
        head_bias=head.bias is not None,
        norm=end,
        entry=tuple(leaves),
        experts=_expert_names(found, stored),
        unread=tuple(_unread(found, stored)),
        entry_operations=tuple(name.removeprefix("aten.") for name in operations if "sym_size" not in name),
        divides=next(filter(None, map(_indivisible, found.kinds)), ""),
    )


def _indivisible(kind: Kind) -> str:
    """Return the reason why ranks cannot share the heads of a layer; "": they can."""
    traced, reader = kind.traced, _reader(kind.traced)
    (attend,) = [node for node in traced.graph.nodes if kind_of(node) == "attend"]
    if not isinstance(kind.heads, ProvenHeads):
        return "operations of the module stand between its projections and attention"
    if reader is None or not only_views(attend, reader.args[0]):  # type: ignore[arg-type]
        return "operations of the module stand between attention and the projection behind it"
    if attend.args[3] is not None and attend.args[3].op != "placeholder":  # type: ignore[union-attr]
        return "operations of the module change its sinks"
    return ""


def _unread(found: Inspected, stored: Stored) -> Iterator[str]:
    """Yield patterns of the names of stored tensors that no operation reads."""
    skeleton = found.skeleton
    yield from getattr(type(skeleton.model), "_keys_to_ignore_on_load_unexpected", None) or ()
    for kind in found.kinds:
        used = ancestors(outputs_of(kind.traced), [])
        for name, node in inputs_of(kind.traced).items():
            if node not in used and name not in RESERVED and not name.startswith("extra"):
                at = f"{skeleton.at}.{kind.layers[0]}."
                yield re.escape(stored(at + name)).replace(rf"\.{kind.layers[0]}\.", r"\.\d+\.", 1) + "$"


def _end(found: Inspected, stored: Stored) -> ForeignNorm:
    if found.end is None:
        raise refused({"model_type": found.skeleton.config.model_type}, "no norm is behind its layers")
    width = found.skeleton.config.hidden_size
    made = leaf_args(Leaf("norm", NORM, found.end), found.skeleton.names[found.end], stored, width=width)
    assert isinstance(made, ForeignNorm), "the leaf is a norm"
    return made


def _layer(found: Inspected, kind: Kind, number: int, stored: Stored) -> LayerArgs:
    traced, layer = kind.traced, kind.layers[0]
    at = f"{found.skeleton.at}.{layer}."

    def template(name: str) -> str:
        """Return the name in the checkpoint, with the number of the layer left open."""
        made = stored(name)
        return made.replace(f".{layer}.", ".{i}.", 1)

    (call,) = traced.calls
    heads = kind.heads
    leaves, gates = _leaves(found, kind, at, template)
    prepared = isinstance(heads, ProvenHeads)
    sizes = _sizes(traced, heads)
    attention = GroupedArgs(
        num_heads=sizes[0],
        num_kv_heads=sizes[1],
        head_dim=sizes[2],
        rotary_dim=sizes[2],
        rope=UNROTATED,
        window=call.window,
        scores=ScoreArgs(
            scale=call.scale * (heads.factor if isinstance(heads, ProvenHeads) else 1.0),
            soft_cap=call.soft_cap,
            sinks=call.sinks,
        ),
    )
    norms = [leaf_args(traced.leaves[key], at + traced.leaves[key].name, template) for key in _head_norms(heads)]
    order = heads.order if isinstance(heads, ProvenHeads) else ()
    mixer = ForeignArgs(
        attention=attention,
        prepared=prepared,
        apart=heads if isinstance(heads, str) else "",
        turn=kind.turn,
        order=() if order == tuple(range(sizes[2])) else order,
        head_norm=tuple(norms),  # type: ignore[arg-type]
        leaves=tuple(leaves),
        gates=tuple(gates),
        operations=tuple(left_operations(traced, kind.halves, prepared=prepared)),
        kind=number,
    )
    return LayerArgs(mixer=mixer, feed_forward=_experts(found, kind), norms="")


def _experts(found: Inspected, kind: Kind) -> NoneArgs | ForeignExpertsArgs:
    """Return the experts of a layer."""
    leaves = [leaf for leaf in kind.traced.leaves if leaf.kind == EXPERTS]
    if not leaves:
        return NONE
    module: Any = leaves[0].module
    form, words = experts_form(module), {"model_type": found.skeleton.config.model_type}
    if form is None or len(leaves) > 1:
        raise refused(words, f"layer {kind.layers[0]} has experts of a form that Quire's kernels do not have")
    nodes = [node for node in kind.traced.graph.nodes if kind_of(node) == EXPERTS]
    top_k = nodes[0].args[1].meta["val"].shape[-1]
    return ForeignExpertsArgs(
        routing=Routing(num_experts=form.count, top_k=int(top_k), scoring="softmax"),
        expert_size=form.size,
        shared_size=0,
        shared_gate=False,
        router_float=False,
        act=form.act,
        biased=form.biased,
        stored=form.stored,
    )


def _expert_names(found: Inspected, stored: Stored) -> tuple[tuple[str, str, str], ...]:
    for kind in found.kinds:
        for leaf in kind.traced.leaves:
            if leaf.kind == EXPERTS:
                form = experts_form(leaf.module)
                assert form is not None, "others were refused"
                return tuple(expert_names(found.skeleton, kind.layers[0], leaf.name, stored, form))
    return ()


def _head_norms(heads: ProvenHeads | str) -> tuple[int, ...]:
    return heads.norms if isinstance(heads, ProvenHeads) else ()


def _sizes(traced: TracedGraph, heads: ProvenHeads | str) -> tuple[int, int, int]:
    """Return query heads, KV heads, and dimensions of a head."""
    if isinstance(heads, ProvenHeads):
        return len(heads.q.starts), len(heads.k.starts), heads.q.size
    (attend,) = [node for node in traced.graph.nodes if kind_of(node) == "attend"]
    q, k = (node.meta["val"].shape for node in attend.args[:2])
    return int(q[1]), int(k[1]), int(q[3])


def _leaves(found: Inspected, kind: Kind, at: str, stored: Stored) -> tuple[list[ForeignLeaf], list[ForeignGate]]:
    """Return the parameters of a layer and its activations that kernels compute."""
    traced, heads = kind.traced, kind.heads
    fused = set[int]()
    made = list[ForeignLeaf]()
    if isinstance(heads, ProvenHeads):
        made.append(_qkv(traced, heads, at, stored))
        fused |= {heads.q.linear, heads.k.linear, heads.v.linear, *heads.norms}
    gates = list[ForeignGate]()
    shards = _shards(kind)
    for half in kind.halves:
        made.append(_gate(traced, half, at, stored))
        fused |= set(half.sources)
        names = {"source": gate_name(traced, half), "reads": _name(traced, half.reads)}
        gates.append(ForeignGate(act=half.act, gated=half.gated, **names))
    used = ancestors(outputs_of(traced), [])
    for key, leaf in enumerate(traced.leaves):
        if (
            leaf.kind != EXPERTS
            and key not in fused
            and any(kind_of(node) and key_of(node) == key and kind_of(node) != "attend" for node in used)
        ):
            made.append(leaf_args(leaf, at + leaf.name, stored, shards.get(key, ""), _width_of(traced, key)))
    return made + _tensors(found, traced, used, at, stored), gates


def _name(traced: TracedGraph, node: fx.Node) -> str:
    return traced.leaves[key_of(node)].name


def gate_name(traced: TracedGraph, half: Half) -> str:
    """Return the name of the linear layer before an activation; one of two layers that are fused."""
    name = traced.leaves[half.sources[0]].name
    return name if len(half.sources) == 1 else f"{name.rpartition('.')[0]}.gate_up".lstrip(".")


def _shards(kind: Kind) -> dict[int, str]:
    """Return how ranks share linear layers: the outputs of one, and the inputs of the one that reads them.

    Between both are attention or operations on each number by itself.
    """
    traced, found = kind.traced, dict[int, str]()
    if isinstance(kind.heads, ProvenHeads):
        output = _reader(traced)
        if output is not None:
            found[key_of(output)] = "columns"
    for half in kind.halves:
        found[key_of(half.reads)] = "columns"
        found |= dict.fromkeys(half.sources, "rows")
    return found


def _reader(traced: TracedGraph) -> fx.Node | None:
    """Return the linear layer that reads the result of attention, and nothing else; None: several do, or none."""
    (attend,) = [node for node in traced.graph.nodes if kind_of(node) == "attend"]
    linears = [node for node in traced.graph.nodes if kind_of(node) == LINEAR]
    readers = [node for node in linears if attend in ancestors(node.args[:1], linears)]  # type: ignore[arg-type]
    return readers[0] if len(readers) == 1 else None


def _qkv(traced: TracedGraph, heads: ProvenHeads, at: str, stored: Stored) -> ForeignLinear:
    sides = {"q": heads.q, "k": heads.k, "v": heads.v}
    plain = heads.order == tuple(range(heads.q.size))

    def rows(name: str, side: Side) -> ForeignRows:
        module: Any = traced.leaves[side.linear].module
        return ForeignRows(
            stored=_module(at + traced.leaves[side.linear].name, stored),
            total=module.out_features,
            starts=side.starts,
            size=side.size,
            order=() if plain or name == "v" else heads.order,
        )

    module: Any = traced.leaves[heads.q.linear].module
    return ForeignLinear(
        name=QKV,
        parts=tuple((name, rows(name, side)) for name, side in sides.items()),
        width=module.in_features,
        bias=module.bias is not None,
        shard="rows",
    )


def _gate(traced: TracedGraph, half: Half, at: str, stored: Stored) -> ForeignLinear:
    modules: list[Any] = [traced.leaves[key].module for key in half.sources]
    names = [_module(at + traced.leaves[key].name, stored) for key in half.sources]

    def whole(name: str, module: Any, first: int = 0, size: int = 0) -> ForeignRows:
        return ForeignRows(stored=name, total=module.out_features, starts=(first,), size=size or module.out_features)

    if len(modules) == 2:
        parts = [("gate", whole(names[0], modules[0])), ("up", whole(names[1], modules[1]))]
    elif half.gated:
        size = modules[0].out_features // 2
        firsts = (size, 0) if half.swapped else (0, size)
        parts = [
            (word, whole(names[0], modules[0], first, size)) for word, first in zip(("gate", "up"), firsts, strict=True)
        ]
    else:
        parts = [("", whole(names[0], modules[0]))]
    return ForeignLinear(
        name=gate_name(traced, half),
        parts=tuple(parts),
        width=modules[0].in_features,
        bias=modules[0].bias is not None,
        shard="rows",
    )


def _module(name: str, stored: Stored) -> str:
    return stored(f"{name}.weight").removesuffix(".weight")


def _width_of(traced: TracedGraph, key: int) -> int:
    """Return the width of the input of a leaf."""
    node = next(node for node in traced.graph.nodes if kind_of(node) and key_of(node) == key)
    return int(node.args[0].meta["val"].shape[-1])


def leaf_args(leaf: Leaf, name: str, stored: Stored, shard: str = "", width: int = 0) -> ForeignLeaf:
    """Return a linear layer or a norm.

    name    of the module in transformers' model
    width   of a norm that takes any width
    """
    module: Any = leaf.module
    if leaf.kind == LINEAR:
        rows = ForeignRows(
            stored=_module(name, stored), total=module.out_features, starts=(0,), size=module.out_features
        )
        return ForeignLinear(
            name=leaf.name, parts=(("", rows),), width=module.in_features, bias=module.bias is not None, shard=shard
        )
    form, weighted = norm_form(module), getattr(module, "weight", None) is not None
    assert form is not None, "the leaf is a norm"
    return ForeignNorm(
        name=leaf.name,
        stored=_module(name, stored) if weighted else "",
        width=norm_width(module) or width,
        eps=form.eps,
        plus_one=form.plus_one,
        centered=form.centered,
        bias=getattr(module, "bias", None) is not None,
    )


def _tensors(
    inspected: Inspected, traced: TracedGraph, used: set[fx.Node], at: str, stored: Stored
) -> list[ForeignLeaf]:
    """Return the parameters that operations of PyTorch read."""
    found = list[ForeignLeaf]()
    sinks = [node.args[3] for node in traced.graph.nodes if kind_of(node) == "attend"]
    for name, node in inputs_of(traced).items():
        if node in used and name not in traced.constants and name not in RESERVED and not name.startswith("extra"):
            made = ForeignTensor(
                name=name,
                stored=stored(at + name),
                shape=tuple(int(size) for size in node.meta["val"].shape),
                shard="rows" if node in sinks else "",
                dtype="float32" if inspected.skeleton.stays_float(at + name) else "",
            )
            found.append(made)
    return found
