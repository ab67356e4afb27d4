"""Graphs as programs: steps that call our layers, or operations of PyTorch, on a row of tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from quire.foreign.trace import STRIDED, aten

Step = Callable[["LayerRun", list[Any]], Any]
WORDS = (  # operations on each number by itself, which take hidden states of any shape
    "add sub mul div neg gelu relu silu sigmoid tanh pow softplus exp expm1 minimum maximum clamp where gt lt rsqrt "
    "_to_copy"
)
ELEMENTWISE = frozenset(getattr(aten, word) for word in WORDS.split())


@dataclass
class LayerRun:
    """Inputs of a layer in a step: see `DecoderBlock.forward`."""

    ctx: Any
    kv: Any
    turns: Any


class Ours:
    """A step that calls layers of ours, which take rows [T, N]."""

    __name__ = "ours"  # that of the node of a graph

    def __call__(self, run: LayerRun, *values: Any) -> Any:
        """Return the step's result."""
        raise NotImplementedError


@dataclass
class Program:
    """Steps in order. `kind` tells programs apart that run different operations; see `first_of_each_kind`.

    steps    (function, places of its arguments, place of its result, places that are free afterwards)
    inputs   places of the inputs, by name; outputs: places of the results
    flat     True: values are rows [T, N]; False: [1, T, N], as transformers has them
    """

    kind: int
    steps: list[tuple[Step, int, tuple[int, ...]]] = field(compare=False)
    inputs: dict[str, int] = field(compare=False)
    outputs: list[int] = field(compare=False)
    size: int = field(compare=False)
    flat: bool = field(compare=False)

    def __call__(self, run: LayerRun, **values: Any) -> list[Any]:
        """Return the results for inputs by name."""
        row: list[Any] = [None] * self.size
        for name, value in values.items():
            if name in self.inputs:
                row[self.inputs[name]] = value
        values.clear()
        for step, place, free in self.steps:
            row[place] = step(run, row)
            for one in free:
                row[one] = None
        return [row[place] for place in self.outputs]


def compiled(
    graph: fx.Graph,
    names: Sequence[str],
    constants: dict[str, Callable[[], Tensor]],
    device: torch.device,
    kind: int = 0,
    outputs: Sequence[fx.Node] | None = None,
) -> Program:
    """Return the program of a graph.

    names       of the graph's inputs, in order
    constants   functions that return the inputs that are no arguments: parameters and buffers
    outputs     nodes to return; None: those of the graph
    """
    found = outputs if outputs is not None else _outputs(graph)
    if outputs is None and _drop_row_views(graph, found):
        found = _outputs(graph)
    nodes = _needed(graph, found)
    place = {node: i for i, node in enumerate(nodes)}
    flat = all(_is_flat(node) for node in nodes)
    inputs, steps = dict[str, int](), list[tuple[Step, int]]()
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    named = dict(zip(placeholders, names, strict=True))
    for node in nodes:
        if node.op == "placeholder":
            if named[node] in constants:
                steps.append((_constant(constants[named[node]]), place[node]))
            else:
                inputs[named[node]] = place[node]
        elif node.op == "get_attr":
            value = getattr(graph.owning_module, str(node.target)).to(device)
            steps.append((_constant(lambda value=value: value), place[node]))
        else:
            steps.append((_step(node, place, device, flat), place[node]))
    last: dict[int, int] = {}
    for node in nodes:
        for one in node.all_input_nodes:
            last[place[one]] = place[node]
    kept = {place[node] for node in found}
    free: dict[int, list[int]] = {}
    for one, at in last.items():
        if one not in kept:
            free.setdefault(at, []).append(one)
    whole = [(step, at, tuple(free.get(at, ()))) for step, at in steps]
    return Program(kind, whole, inputs, [place[node] for node in found], len(nodes), flat)


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    (node,) = [node for node in graph.nodes if node.op == "output"]
    (value,) = node.args
    return list(value) if isinstance(value, tuple | list) else [value]  # type: ignore[list-item]


def _needed(graph: fx.Graph, outputs: Sequence[fx.Node]) -> list[fx.Node]:
    from quire.foreign.numbers import ancestors

    needed = ancestors(outputs, [])
    return [node for node in graph.nodes if node in needed]


def _drop_row_views(graph: fx.Graph, outputs: Sequence[fx.Node]) -> bool:
    """Leave out views between [1, T, N] and [T, N], if then all values can be rows. Return True if that was done."""
    nodes = _needed(graph, outputs)
    views = [node for node in nodes if node.target in STRIDED and _is_row_view(node)]
    sizes = [node for node in nodes if "sym_size" in str(node.target)]
    if not views or not all(_is_flat(node) for node in nodes if node not in views and node not in sizes):
        return False
    if any(user not in views for size in sizes for user in size.users):
        return False
    for node in views:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    graph.eliminate_dead_code()
    return True


def _is_row_view(node: fx.Node) -> bool:
    assert isinstance(node.args[0], fx.Node), "a view is one of a tensor"
    before, after = (one.meta["val"].shape for one in (node.args[0], node))
    return {len(before), len(after)} <= {2, 3} and before[-1] == after[-1]


def _is_flat(node: fx.Node) -> bool:
    if node.op != "call_function" or isinstance(node.target, Ours):
        return True
    return getattr(node.target, "overloadpacket", None) in ELEMENTWISE


def _constant(value: Callable[[], Tensor]) -> Step:
    return lambda run, row: value()


def _step(node: fx.Node, place: dict[fx.Node, int], device: torch.device, flat: bool) -> Step:
    target = node.target
    if isinstance(target, Ours):
        return _own_step(target, [place[one] for one in node.args], flat)  # type: ignore[index]
    kwargs = dict(node.kwargs)
    if "device" in kwargs:
        kwargs["device"] = device
    target = aten.reshape.default if target in STRIDED else target  # here strides may differ from those of the trace
    assert callable(target), "a node calls a function"
    if not kwargs and all(isinstance(one, fx.Node | int | float) and not isinstance(one, bool) for one in node.args):
        return _simple_step(target, node, place)
    bound = fx.node.map_arg((node.args, kwargs), lambda one: one)

    def step(run: LayerRun, row: list[Any]) -> Any:
        args, more = fx.node.map_arg(bound, lambda one: row[place[one]])
        return target(*args, **more)

    return step


def _simple_step(target: Callable[..., Any], node: fx.Node, place: dict[fx.Node, int]) -> Step:
    """Return the step of an operation whose arguments are values or numbers."""
    args = [(place[one], None) if isinstance(one, fx.Node) else (-1, one) for one in node.args]
    if len(args) == 2 and all(at >= 0 for at, _ in args):
        one, other = args[0][0], args[1][0]
        return lambda run, row: target(row[one], row[other])
    return lambda run, row: target(*[row[at] if at >= 0 else value for at, value in args])


def _own_step(ours: Ours, places: list[int], flat: bool) -> Step:
    """Return the step of ours. Where values are not rows, tokens of its arguments lie behind a dimension of 1."""
    if flat or getattr(ours, "whole", False):
        if len(places) == 1:
            (only,) = places
            return lambda run, row: ours(run, row[only])
        return lambda run, row: ours(run, *[row[at] for at in places])

    def step(run: LayerRun, row: list[Any]) -> Any:
        values = [row[at] for at in places]
        out = ours(run, *[value if value.dim() < 3 else value.reshape(-1, value.shape[-1]) for value in values])
        return out if values[0].dim() < 3 else out.view(*values[0].shape[:-1], -1)

    return step
