"""Graphs evaluated with numbers: a traced graph is a function of the values of some of its nodes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from quire.foreign.leaves import ATTEND, EXPERTS, LINEAR, NORM
from quire.foreign.trace import STRIDED, TracedGraph, aten, key_of, kind_of

Leaves = Callable[[fx.Node, tuple[Any, ...]], Any]  # (node of a leaf, its arguments) -> its value


class NotEvaluated(Exception):
    """A value needs a leaf, or an input, that has no value."""


def evaluate(
    wanted: Sequence[fx.Node], values: Mapping[fx.Node, Any], leaves: Leaves | None = None, device: str = "cpu"
) -> list[Any]:
    """Return the values of nodes.

    values   nodes whose values are known
    leaves   values of leaves; None: a leaf raises NotEvaluated
    """
    known = dict(values)
    for node in sorted(ancestors(wanted, known), key=_order(wanted)):
        if node not in known:
            known[node] = _value(node, known, leaves, device)
    return [known[node] for node in wanted]


def ancestors(wanted: Iterable[fx.Node], stops: Iterable[fx.Node]) -> set[fx.Node]:
    """Return nodes and all nodes that they need; the way ends at `stops`."""
    found, stack, ends = set[fx.Node](), list(wanted), set(stops)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if node not in ends:
                stack += node.all_input_nodes
    return found


def _order(wanted: Sequence[fx.Node]) -> Callable[[fx.Node], int]:
    place = {node: i for i, node in enumerate(wanted[0].graph.nodes)}
    return place.__getitem__


def _value(node: fx.Node, known: Mapping[fx.Node, Any], leaves: Leaves | None, device: str) -> Any:
    if node.op == "get_attr":
        return getattr(node.graph.owning_module, str(node.target))
    if node.op != "call_function":
        raise NotEvaluated(node.name)
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda one: known[one])
    if kind_of(node):
        if leaves is None:
            raise NotEvaluated(node.name)
        return leaves(node, args)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device(device)}
    assert callable(node.target), "a node calls a function"
    target = aten.reshape.default if node.target in STRIDED else node.target  # strides may differ here
    return target(*args, **kwargs)


def inputs_of(traced: TracedGraph) -> dict[str, fx.Node]:
    """Return the inputs of a graph by their names."""
    nodes = [node for node in traced.graph.nodes if node.op == "placeholder"]
    return dict(zip(traced.inputs, nodes, strict=True))


def outputs_of(traced: TracedGraph) -> list[fx.Node]:
    """Return the nodes that a graph returns."""
    (node,) = [node for node in traced.graph.nodes if node.op == "output"]
    (value,) = node.args
    return list(value) if isinstance(value, tuple | list) else [value]  # type: ignore[list-item]


def named_values(traced: TracedGraph, values: Mapping[str, Tensor]) -> dict[fx.Node, Tensor]:
    """Return the values of a graph's inputs: those that are given, buffers, and random numbers for parameters."""
    made = torch.Generator().manual_seed(1)
    found = dict[fx.Node, Tensor]()
    for name, node in inputs_of(traced).items():
        shape = node.meta["val"].shape
        if name in values:
            found[node] = values[name]
        elif name in traced.constants:
            found[node] = traced.constants[name]
        elif not name.startswith(("hidden", "positions", "extra")):
            found[node] = torch.randn(tuple(shape), generator=made)
    return found


def mixed_leaf(node: fx.Node, args: tuple[Any, ...]) -> Tensor:
    """Return a cheap value of a leaf: each row depends on itself alone, and on all of its numbers.

    It stands for any weights: a projection takes some numbers of a row, times factors, and adds their mean.
    """
    x, kind = args[0], kind_of(node)
    if kind == ATTEND:
        q, _, v = args[:3]
        rows = v.repeat_interleave(q.shape[1] // v.shape[1], 1) + q.mean((1, 3), keepdim=True)
        out: Tensor = rows.transpose(1, 2).contiguous()
        return out
    if kind == EXPERTS:
        _, ids, weights = args[:3]
        summed: Tensor = x * (weights * (1.5 + torch.sin(1.0 + ids))).sum(-1, keepdim=True)
        return summed
    if kind == NORM:
        scaled: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return scaled * _factors(x.shape[-1], key_of(node))
    assert kind == LINEAR, "it is one of the kinds of leaves"
    rows_out = int(args[2])
    at = (torch.arange(rows_out) * 7919 + 13 * key_of(node)) % x.shape[-1]
    projected: Tensor = x[..., at] * _factors(rows_out, key_of(node)) + x.mean(-1, keepdim=True)
    return projected


def _factors(size: int, key: int) -> Tensor:
    return 1.0 + 0.5 * torch.sin(torch.arange(size, dtype=torch.float32) * (1.7 + key))


def is_row_wise(traced: TracedGraph, extras: Sequence[Tensor]) -> bool:
    """Return True if a row of the result depends on its own row of the inputs alone, but for attention.

    extras   extra tensors of the rows, as the layer gets them
    """
    made = torch.Generator().manual_seed(2)
    inputs = inputs_of(traced)
    tokens = max((one.shape[i] for one, i in _rows(extras)), default=4)
    hidden = torch.randn(1, tokens, inputs["hidden"].meta["val"].shape[2], generator=made)
    names = ["positions", *(f"extra{i}" for i in range(1, len(extras)))]

    def run(places: Tensor) -> Tensor:
        moved = [_taken(one, places) for one in extras]
        values = named_values(traced, {"hidden": hidden[:, places], **dict(zip(names, moved, strict=True))})
        (out,) = evaluate(outputs_of(traced)[:1], values, mixed_leaf)
        result: Tensor = out
        return result

    places = torch.arange(tokens)
    whole, turned = run(places), run(places.flip(0)).flip(1)
    alone = torch.cat([run(places[i : i + 1]) for i in range(tokens)], 1)
    return torch.allclose(whole, turned, atol=1e-4, rtol=1e-4) and torch.allclose(whole, alone, atol=1e-4, rtol=1e-4)


def _rows(extras: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    from quire.foreign.capture import TOKENS

    return [(one, i) for one in extras for i, size in enumerate(one.shape) if size == TOKENS][:1]


def _taken(one: Tensor, places: Tensor) -> Tensor:
    found = [i for _, i in _rows([one])]
    return one.index_select(found[0], places) if found else one


def is_view(node: fx.Node) -> bool:
    """Return True for an operation that computes nothing."""
    views = {aten.view, aten.transpose, aten.permute, aten.unsqueeze, aten.squeeze, aten.slice, aten.split, aten.select}
    views.add(aten.expand)
    return getattr(node.target, "overloadpacket", None) in views
