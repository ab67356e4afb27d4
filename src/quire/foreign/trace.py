"""Layers and the ends of a model as graphs of PyTorch's operations, for any number of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from quire.contracts.errors import UnsupportedModel
from quire.foreign.capture import Calls, LayerArguments, ModuleAttention, Stubs, answered, outer_params, run_base
from quire.foreign.leaves import ATTEND, EXPERTS, LINEAR, NORM, Leaf, find_leaves, operations, standing_in
from quire.foreign.skeleton import Skeleton

TRACED_TOKENS = 13  # of a trace; any other number gives the same graph
SIZES = (2, 3, TRACED_TOKENS, 300, 5000, 200_000, 20_000_000)  # numbers of tokens that must make the same graph
aten = torch.ops.aten
STRIDED = (aten.view.default, aten._unsafe_view.default)  # operations that need strides of a kind
SAME = frozenset(  # operations whose result is their input, whatever its values
    (
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
        aten.contiguous.default,
        aten.lift_fresh_copy.default,
    )
)


@dataclass(frozen=True)
class TracedGraph:
    """A graph. Its inputs are hidden states [1, T, H], then extra tensors, then parameters and buffers.

    inputs      names of the graph's inputs, in order: "hidden", "positions", "extra0", ..., names of parameters
    leaves      leaves by their keys
    calls       calls of attention by their keys
    constants   values of buffers
    """

    graph: fx.Graph
    inputs: tuple[str, ...]
    leaves: list[Leaf]
    calls: list[ModuleAttention]
    constants: dict[str, Tensor]


def copied(traced: TracedGraph) -> TracedGraph:
    """Return a copy of a traced layer, whose graph may be rewritten."""
    graph, places = fx.Graph(traced.graph.owning_module), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(traced.graph, places))
    for before, after in places.items():
        after.meta = dict(before.meta)
    return replace(traced, graph=graph)


def kind_of(node: fx.Node) -> str:
    """Return the kind of a leaf's node: LINEAR, NORM, ATTEND or EXPERTS; "" for another node."""
    ops = operations()
    kinds = {
        ops.linear.default: LINEAR,
        ops.norm.default: NORM,
        ops.attend.default: ATTEND,
        ops.experts.default: EXPERTS,
    }
    return kinds.get(node.target, "") if node.op == "call_function" else ""


def key_of(node: fx.Node) -> int:
    """Return the key of a leaf's node."""
    return int(node.args[{ATTEND: 4, EXPERTS: 3}.get(kind_of(node), 1)])  # type: ignore[arg-type]


def graph_of(run: Callable[..., Any], tensors: Sequence[Tensor], moving: Sequence[int]) -> fx.Graph:
    """Return the graph of a function of tensors.

    moving   of each tensor, the dimension that grows with tokens; -1: none does
    Raises an error of PyTorch for a function whose way depends on values.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def faked(one: Tensor, dim: int) -> Tensor:
        sizes = [DimDynamic.DYNAMIC if i == dim else DimDynamic.STATIC for i in range(one.dim())]
        fake: Tensor = mode.from_tensor(one, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
        return fake

    def traced(run: Callable[..., Any]) -> fx.Graph:
        with torch.no_grad():
            graph: fx.Graph = make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*fakes).graph
        return graph

    fakes = [faked(one, dim) for one, dim in zip(tensors, moving, strict=True)]
    graph = traced(run)
    _check_guards(mode.shape_env)
    if any(_writes(node) for node in graph.nodes):  # then once more, without operations in place
        graph = traced(torch.func.functionalize(run, remove="mutations"))
    return simplified(graph)


def _check_guards(shapes: Any) -> None:
    """Raise ValueError if a trace has decided something by the number of tokens that other numbers would not decide."""
    for guard in shapes.guards:
        for count in SIZES:
            if not bool(guard.expr.subs(dict.fromkeys(guard.expr.free_symbols, count))):
                raise ValueError(f"it decides by the number of tokens of a step ({guard.expr})")


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def simplified(graph: fx.Graph) -> fx.Graph:
    """Leave out the operations of a graph that change nothing."""
    for node in list(graph.nodes):
        if node.op == "call_function" and (node.target in SAME or _casts_nothing(node)):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return graph


def _casts_nothing(node: fx.Node) -> bool:
    if node.target is not aten._to_copy.default:
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return bool(before.dtype == after.dtype)


def trace_layer(
    skeleton: Skeleton, number: int, inputs: LayerArguments, extras: Sequence[Tensor], marks: Calls, dtype: torch.dtype
) -> TracedGraph:
    """Trace a layer.

    inputs   its arguments in the captured run
    extras   tensors of the captured run that layers may be given, positions first
    marks    masks of the captured run
    """
    layer: nn.Module = skeleton.layers[number]
    at = f"{skeleton.at}.{number}."
    leaves = find_leaves(layer, lambda name: skeleton.stays_float(at + name))
    inside = {id(param) for leaf in leaves for param in leaf.module.parameters()}
    own = {name: one for name, one in layer.named_parameters() if id(one) not in inside}
    buffers, kept = buffers_of(layer)
    own |= kept
    names = [*own, *buffers]
    calls = Calls(marks=marks.marks, kept=marks.kept)
    place = {id(one): i for i, one in enumerate(extras)}

    def run(hidden: Tensor, *tensors: Tensor) -> Any:
        calls.found.clear()  # of a run before
        given = tensors[: len(extras)]
        values = dict(zip(names, tensors[len(extras) :], strict=True))
        args, kwargs = replaced((inputs.args, inputs.kwargs), place, given)
        out = torch.func.functional_call(layer, values, (hidden, *args), kwargs)
        return out[0] if isinstance(out, tuple) else out

    width = skeleton.base.config.hidden_size
    hidden = torch.empty(1, TRACED_TOKENS, width, dtype=dtype)
    grown, moving = _grown(extras)
    with standing_in(leaves), answered(calls):
        graph = graph_of(
            run,
            [hidden, *grown, *_stand_ins(skeleton, at, own, dtype), *buffers.values()],
            [1, *moving, *[-1] * len(names)],
        )
    labels = ["hidden", "positions", *(f"extra{i}" for i in range(1, len(extras))), *names]
    return TracedGraph(graph, tuple(labels), leaves, calls.found, buffers)


def buffers_of(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the buffers of a module with fixed numbers, and those that a checkpoint has, by their names."""
    stored = module.state_dict().keys()
    found = dict(module.named_buffers())
    return (
        {name: one for name, one in found.items() if name not in stored},
        {name: one for name, one in found.items() if name in stored},
    )


def _stand_ins(skeleton: Skeleton, at: str, own: dict[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return memory for parameters that have none, in the dtypes that they are loaded in.

    at   begin of their names in the model
    A trace makes constants on the device of its inputs.
    """
    return [torch.empty(one.shape, dtype=_loaded(skeleton, at + name, one, dtype)) for name, one in own.items()]


def _loaded(skeleton: Skeleton, name: str, one: Tensor, dtype: torch.dtype) -> torch.dtype:
    if not one.is_floating_point():
        return one.dtype
    return torch.float32 if skeleton.stays_float(name) else dtype


def prefix_of(skeleton: Skeleton, module: nn.Module) -> str:
    """Return the begin of the names below a module, with a dot behind; "" for the whole model."""
    name = skeleton.names[module]
    return f"{name}." if name else ""


def replaced(value: Any, place: dict[int, int], given: Sequence[Tensor]) -> Any:
    """Return a value of nested containers with its extra tensors replaced by those that are given."""
    if isinstance(value, Tensor):
        return given[place[id(value)]] if id(value) in place else value
    if isinstance(value, dict):
        return {name: replaced(one, place, given) for name, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(replaced(one, place, given) for one in value)
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if type(value) in (tuple, list) else ()
    return [one for part in parts for one in tensors_of(part)]


def _grown(extras: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Return extra tensors for `TRACED_TOKENS` tokens, and the dimension of each that grows with tokens."""
    from quire.foreign.capture import TOKENS

    made, moving = list[Tensor](), list[int]()
    for one in extras:
        at = [i for i, size in enumerate(one.shape) if size == TOKENS][:1]
        sizes = [TRACED_TOKENS if i in at else size for i, size in enumerate(one.shape)]
        made.append(torch.empty(sizes, dtype=one.dtype))
        moving.append(at[0] if at else -1)
    return made, moving


def trace_ends(skeleton: Skeleton, stubs: Stubs, extras: Sequence[Tensor], dtype: torch.dtype) -> TracedGraph:
    """Trace a base model without its layers, from embedded tokens and positions.

    The graph returns the hidden states before the first layer, the extra tensors, and last the result of the model.
    """
    base, places = skeleton.base, [_place(stubs, one) for one in extras[1:]]
    leaves = [leaf for leaf in find_outer(skeleton)]
    inside = {id(param) for leaf in leaves for param in leaf.module.parameters()}
    own = {name: one for name, one in outer_params(skeleton).items() if id(one) not in inside}
    held = {id(one) for one in skeleton.layers.buffers()}
    buffers, kept = buffers_of(base)
    buffers, kept = ({name: one for name, one in each.items() if id(one) not in held} for each in (buffers, kept))
    own |= kept
    names = [*own, *buffers]

    def run(hidden: Tensor, positions: Tensor, *tensors: Tensor) -> Any:
        again = Stubs(skeleton, as_tuple=stubs.as_tuple)
        out = run_base(skeleton, again, dict(zip(names, tensors, strict=True)), hidden, positions)
        return (again.seen[0], *(_at(again.inputs[layer], way) for layer, way in places), out)

    hidden = torch.empty(1, TRACED_TOKENS, base.get_input_embeddings().embedding_dim, dtype=dtype)
    positions = torch.empty(1, TRACED_TOKENS, dtype=torch.int64)
    calls = Calls()
    with standing_in(leaves), answered(calls):
        graph = graph_of(
            run,
            [hidden, positions, *_stand_ins(skeleton, prefix_of(skeleton, base), own, dtype), *buffers.values()],
            [1, 1, *[-1] * len(names)],
        )
    return TracedGraph(graph, ("hidden", "positions", *names), leaves, [], buffers)


def find_outer(skeleton: Skeleton) -> list[Leaf]:
    """Return the leaves of a base model outside its layers."""
    inside = set(skeleton.layers.modules())
    at = prefix_of(skeleton, skeleton.base)
    leaves = find_leaves(skeleton.base, lambda name: skeleton.stays_float(at + name))
    return [leaf for leaf in leaves if leaf.module not in inside]


def _place(stubs: Stubs, tensor: Tensor) -> tuple[int, tuple[Any, ...]]:
    """Return the first layer that is given a tensor, and the keys that lead to it in the layer's arguments."""

    def search(value: Any, way: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if value is tensor:
            return way
        pairs = value.items() if isinstance(value, dict) else enumerate(value) if type(value) in (tuple, list) else ()
        return next((found for key, one in pairs if (found := search(one, (*way, key))) is not None), None)

    ways = ((layer, search((own.args, own.kwargs), ())) for layer, own in enumerate(stubs.inputs))
    return next((layer, way) for layer, way in ways if way is not None)


def _at(inputs: LayerArguments, way: tuple[Any, ...]) -> Any:
    value: Any = (inputs.args, inputs.kwargs)
    for key in way:
        value = value[key]
    return value


def check_rows(traced: TracedGraph, what: str, refused: Callable[[str], UnsupportedModel]) -> None:
    """Raise the error for a graph that makes positions by itself, from the number of tokens."""
    for node in traced.graph.nodes:
        if node.target in (aten.arange.default, aten.arange.start, aten.arange.start_step) and _counts(node):
            raise refused(
                f"{what} makes positions from the length of a cache, and tokens of several texts lie in one row; "
                "llama4_text of Quire has the same layers"
            )


def _counts(node: fx.Node) -> bool:
    """True if an arange is as long as the row of tokens."""
    return any(isinstance(one, fx.Node) for one in node.args)
