"""Traced layers rewritten: nodes of leaves become calls of our layers, and neighbours are joined as ours join them."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from quire.args.layers import NormArgs
from quire.foreign.halves import Half
from quire.foreign.leaves import ATTEND, EXPERTS, LINEAR, NORM, norm_form
from quire.foreign.numbers import NotEvaluated, ancestors, evaluate, is_view
from quire.foreign.program import Ours
from quire.foreign.steps import Activated, Added, ChosenExperts, NormAdded, Normed, PreparedAttention, Projection
from quire.foreign.trace import TracedGraph, aten, copied, key_of, kind_of
from quire.layers.linear import Linear
from quire.layers.norm import Norm


def put_attention(traced: TracedGraph, step: Ours, *, prepared: bool) -> None:
    """Replace the call of attention, and before a prepared one its projections and all between."""
    graph = traced.graph
    (attend,) = [node for node in graph.nodes if kind_of(node) == ATTEND]
    sinks = [attend.args[3]] if attend.args[3] is not None else []
    with graph.inserting_before(attend):
        if not prepared:
            new = graph.call_function(step, (*attend.args[:3], *sinks))
            new.meta = dict(attend.meta)
            attend.replace_all_uses_with(new)
            return
        linears = [node for node in graph.nodes if kind_of(node) == LINEAR]
        sides: list[fx.Node] = list(attend.args[:3])  # type: ignore[arg-type]
        source = next(node for node in linears if node in ancestors(sides, linears))
        new = graph.call_function(step, (source.args[0], *sinks))
    merged = _merged(graph, attend, new)
    if merged is None:
        shape = attend.meta["val"].shape
        with graph.inserting_after(new):
            view = graph.call_function(aten.view.default, (new, [1, -1, int(shape[2]), int(shape[3])]))
        attend.replace_all_uses_with(view)


def _merged(graph: fx.Graph, attend: fx.Node, new: fx.Node) -> fx.Node | None:
    """Let a chain of views that ends in all heads side by side be the new node, whose result is that."""
    shape, node = attend.meta["val"].shape, attend
    width = int(shape[2]) * int(shape[3])
    while len(node.users) == 1 and node.meta["val"].dim() != 3:
        (node,) = node.users
        if not is_view(node):
            return None
    if node.meta["val"].dim() != 3 or node.meta["val"].shape[2] != width:
        return None
    x = torch.randn(1, 6, int(shape[2]), int(shape[3]))
    sizes = {one: 6 for one in graph.nodes if "sym_size" in str(one.target)}
    try:
        (out,) = evaluate([node], {attend: x, **sizes})
    except (NotEvaluated, RuntimeError):
        return None
    if not torch.equal(out, x.flatten(2)):
        return None
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    return new


def only_views(attend: fx.Node, last: fx.Node) -> bool:
    """Return True if nothing but views leads from attention to a node: all heads side by side."""
    sizes = ancestors([last], [attend]) - {attend}
    return all(is_view(one) or "sym_size" in str(one.target) or one.op == "placeholder" for one in sizes)


def put_gate(traced: TracedGraph, reads: int, step: Activated) -> None:
    """Replace what the linear layer `reads` reads: an activation and the linear layers before it."""
    graph = traced.graph
    (reader,) = [node for node in graph.nodes if kind_of(node) == LINEAR and key_of(node) == reads]
    linears = [node for node in graph.nodes if kind_of(node) == LINEAR]
    x = reader.args[0]
    assert isinstance(x, fx.Node), "a layer reads a tensor"
    source = next(node for node in linears if node in ancestors([x], linears))
    with graph.inserting_before(reader):
        new = graph.call_function(step, (source.args[0],))
    new.meta = dict(x.meta)
    reader.replace_input_with(x, new)


def put_leaves(
    traced: TracedGraph, linears: Mapping[int, Linear], norms: Mapping[int, Norm], experts: ChosenExperts | None = None
) -> None:
    """Replace the other linear layers, norms and experts, by their keys, and join neighbours."""
    graph = traced.graph
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        kind = kind_of(node)
        if kind == EXPERTS:
            node.target, node.args = experts, node.args[:3]  # type: ignore[assignment]
        if kind in (LINEAR, NORM):
            step: Ours = Projection(linears[key_of(node)]) if kind == LINEAR else Normed(norms[key_of(node)])
            node.target, node.args = step, (node.args[0],)
    for node in list(graph.nodes):
        if isinstance(node.target, Normed):
            _join_norm(graph, node)
    for node in list(graph.nodes):
        if node.target is aten.add.Tensor and not node.kwargs and all(isinstance(one, fx.Node) for one in node.args):
            _join_sum(graph, node)
    graph.eliminate_dead_code()


def _join_norm(graph: fx.Graph, node: fx.Node) -> None:
    """Let the only projection of a norm's result norm its input."""
    if len(node.users) != 1:
        return
    (user,) = node.users
    if isinstance(user.target, PreparedAttention | Activated | Projection) and user.args[0] is node:
        columns = isinstance(user.target, Projection) and user.target.linear.tp is not None
        if not columns:
            user.target.norm = node.target.norm  # type: ignore[union-attr]
            user.replace_input_with(node, node.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)


def _join_sum(graph: fx.Graph, node: fx.Node) -> None:
    """Let projections and norms of a sum add their results to the rest of it, where nothing else reads these."""
    if len(node.users) == 1 and _is_sum(next(iter(node.users))):
        return  # a part of a longer sum
    terms = list(_terms(node))
    if any(one.meta["val"].shape != node.meta["val"].shape for one in terms):
        return
    joined = [one for one in terms if len(one.users) == 1 and _joins(one)]
    others = [one for one in terms if one not in joined]
    if not others:
        others, joined = [joined[0]], joined[1:]
    with graph.inserting_before(node):
        total = others[0]
        for one in others[1:]:
            total = _like(node, graph.call_function(aten.add.Tensor, (total, one)))
        for number, one in enumerate(joined):
            if number == 0 and len(others) == 1 and not _is_free(graph, total, node):
                total = _like(node, graph.call_function(aten.add.Tensor, (total, one)))
                continue
            target: Any = one.target
            step = Added(target.linear) if isinstance(target, Projection) else NormAdded(target.norm)
            total = _like(node, graph.call_function(step, (one.args[0], total)))
    node.replace_all_uses_with(total)


def _like(node: fx.Node, new: fx.Node) -> fx.Node:
    new.meta = dict(node.meta)
    return new


def _is_sum(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.add.Tensor and not node.kwargs


def _terms(node: fx.Node) -> list[fx.Node]:
    found = list[fx.Node]()
    for one in node.args:
        assert isinstance(one, fx.Node), "both are tensors"
        found += _terms(one) if _is_sum(one) and len(one.users) == 1 else [one]
    return found


def _joins(node: fx.Node) -> bool:
    if isinstance(node.target, Projection):
        return node.target.norm is None
    return isinstance(node.target, Normed) and not node.target.norm.args.centered


def _is_free(graph: fx.Graph, node: fx.Node, before: fx.Node) -> bool:
    """Return True if nothing from `before` on reads a value but the sum itself, so that its memory may be reused.

    A value's views have the same memory. Inputs but the hidden states are read by other layers, too.
    """
    base = node
    while base.op == "call_function" and is_view(base) and isinstance(base.args[0], fx.Node):
        base = base.args[0]
    if base.op == "get_attr" or base.op == "placeholder" and base is not next(iter(graph.nodes)):
        return False
    place = {one: i for i, one in enumerate(graph.nodes)}
    stack, users = [base], list[fx.Node]()
    while stack:
        for user in stack.pop().users:
            (stack if is_view(user) or user.target is operator.getitem else users).append(user)
    return all(place[user] < place[before] or user is before or _within(user, before) for user in users)


def _within(user: fx.Node, total: fx.Node) -> bool:
    """Return True for a part of the same sum."""
    while _is_sum(user) and len(user.users) == 1 and user is not total:
        (user,) = user.users
    return user is total


class _Anything(Linear):
    """Stands for a linear layer where only the shape of a program matters."""

    tp = None

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)


def left_operations(traced: TracedGraph, halves: Sequence[Half], *, prepared: bool) -> list[str]:
    """Return the operations of PyTorch that a layer's program runs beside our kernels, in their order."""
    own = copied(traced)
    linear: Any = _Anything()
    graph = own.graph
    put_attention(own, _Step(), prepared=prepared)
    for half in halves:
        put_gate(own, key_of(half.reads), Activated(linear))
    keys = range(len(traced.leaves))
    put_leaves(
        own,
        dict.fromkeys(keys, linear),
        {key: _norm_of(traced, key) for key in keys},
        ChosenExperts.__new__(ChosenExperts),
    )
    found = [getattr(node.target, "overloadpacket", node.target) for node in graph.nodes if node.op == "call_function"]
    names = [str(one).removeprefix("aten.") for one in found if not isinstance(one, Ours)]
    return [name for name in names if name not in ("sym_size", "view", "_unsafe_view") and "getitem" not in name]


class _Step(PreparedAttention):
    """Stands for attention."""

    def __init__(self) -> None:
        self.norm = None


def _norm_of(traced: TracedGraph, key: int) -> Norm:
    """Return a norm without weights, for the form of which neighbours ask."""
    form = norm_form(traced.leaves[key].module)
    made = Norm.__new__(Norm)
    torch.nn.Module.__init__(made)
    made.args = NormArgs(eps=0.0, centered=form is not None and form.centered)
    return made
