"""The inspection of a decoder of transformers: each kind of layer is traced once, and compared with ours."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from quire.contracts.errors import UnsupportedModel
from quire.foreign.capture import Calls, LayerArguments, Stubs, captured
from quire.foreign.halves import Half, find_halves
from quire.foreign.heads import ProvenHeads, find_heads
from quire.foreign.leaves import NORM
from quire.foreign.numbers import (
    NotEvaluated,
    ancestors,
    evaluate,
    inputs_of,
    is_row_wise,
    is_view,
    named_values,
    outputs_of,
)
from quire.foreign.skeleton import Skeleton, refused
from quire.foreign.trace import (
    TracedGraph,
    check_rows,
    copied,
    key_of,
    kind_of,
    tensors_of,
    trace_ends,
    trace_layer,
)

Traced = TypeVar("Traced")


@dataclass
class Kind:
    """Layers that run the same operations.

    layers   their numbers
    heads    the way from projections to attention, or the reason why it stays the module's
    turn     number of the rotation among those of the model; -1: none of ours
    """

    layers: list[int]
    traced: TracedGraph
    heads: ProvenHeads | str
    halves: list[Half]
    turn: int = -1


@dataclass
class Inspected:
    """A decoder of transformers, inspected.

    extras    extra tensors of the captured run that layers are given, positions first
    entry     graph from embedded tokens to the first layer's hidden states and the extra tensors
    end       leaf of the norm behind the layers; None: there is none
    kinds     kinds of layers
    turns     of each rotation of ours, the kind whose heads have it
    """

    skeleton: Skeleton
    stubs: Stubs
    calls: Calls
    extras: list[Tensor]
    entry: TracedGraph
    end: nn.Module | None
    kinds: list[Kind] = field(default_factory=list)
    turns: list[Kind] = field(default_factory=list)

    def kind_of(self, layer: int) -> Kind:
        """Return the kind of a layer."""
        return next(kind for kind in self.kinds if layer in kind.layers)


def inspect(raw: dict[str, Any], skeleton: Skeleton) -> Inspected:
    """Inspect a model. Raises `UnsupportedModel` with what was found, for a model that cannot run."""
    calls = Calls()
    stubs = captured(raw, skeleton, calls)
    extras = _extras(stubs, calls)
    error = lambda why: refused(raw, why)  # noqa: E731
    entry, end = _traced(
        lambda: traced_ends(skeleton, stubs, extras, torch.float32), "what is around its layers", error
    )
    check_rows(entry, "what is before its layers", error)
    _check_extras(entry, error)
    found_end = _end(entry, end, error)
    found = Inspected(skeleton, stubs, calls, extras, entry, found_end)
    groups = _alike(skeleton, stubs, extras, calls)
    graphs = [
        _traced(lambda first=layers[0]: traced_layer(found, first, torch.float32), f"layer {layers[0]}", error)
        for layers in groups
    ]
    for layers, traced in zip(groups, graphs, strict=True):
        check_rows(traced, f"layer {layers[0]}", error)
    found.kinds += [_kind(found, layers, traced, error) for layers, traced in zip(groups, graphs, strict=True)]
    _number_turns(found)
    return found


def traced_layer(found: Inspected, layer: int, dtype: torch.dtype) -> TracedGraph:
    """Trace a layer of an inspected model in a dtype."""
    return trace_layer(found.skeleton, layer, found.stubs.inputs[layer], found.extras, found.calls, dtype)


def traced_ends(
    skeleton: Skeleton, stubs: Stubs, extras: Sequence[Tensor], dtype: torch.dtype
) -> tuple[TracedGraph, fx.Node]:
    """Return the graph from embedded tokens to hidden states and extra tensors, and the node of the model's result.

    The node is of a graph of its own, in which the result follows these hidden states.
    """
    whole = trace_ends(skeleton, stubs, extras, dtype)
    entry = copied(whole)
    (output,) = [node for node in entry.graph.nodes if node.op == "output"]
    output.args = (tuple(outputs_of(entry)[:-1]),)
    entry.graph.eliminate_dead_code()
    return entry, outputs_of(whole)[-1]


def _traced(trace: Callable[[], Traced], what: str, error: Callable[[str], UnsupportedModel]) -> Traced:
    try:
        return trace()
    except UnsupportedModel:
        raise
    except Exception as cause:
        why = f"{type(cause).__name__}: {cause}".splitlines()[0][:160]
        raise error(f"{what} cannot be traced: its way depends on values, or it needs a cache ({why})") from None


def _extras(stubs: Stubs, calls: Calls) -> list[Tensor]:
    """Return the tensors that layers are given beside hidden states and masks; the first one is the positions."""
    found: dict[int, Tensor] = {}
    for one in tensors_of([(own.args, own.kwargs) for own in stubs.inputs]):
        if id(one) not in calls.marks:
            found.setdefault(id(one), one)
    count = torch.arange(stubs.seen[0].shape[1])[None]
    first = next((one for one in found.values() if one.dtype == torch.int64 and one.equal(count)), count)
    return [first, *(one for one in found.values() if one is not first)]


def _check_extras(entry: TracedGraph, error: Callable[[str], UnsupportedModel]) -> None:
    """Refuse extra tensors that depend on tokens: they are computed once a step, from positions alone."""
    hidden = inputs_of(entry)["hidden"]
    for node in outputs_of(entry)[1:]:
        reached = ancestors([node], [])
        if any(
            one is not node and hidden in one.all_input_nodes and "sym_size" not in str(one.target) for one in reached
        ):
            raise error("its layers have further inputs that depend on tokens")


def _end(entry: TracedGraph, out: fx.Node, error: Callable[[str], UnsupportedModel]) -> nn.Module | None:
    """Return the norm behind the layers; None: there is none.

    out   result of the model, in a graph in which the layers return what they get
    """
    (output,) = [node for node in out.graph.nodes if node.op == "output"]
    hidden = output.args[0][0]  # type: ignore[index]
    width = hidden.meta["val"].shape[-1]
    while out is not hidden and is_view(out) and isinstance(out.args[0], fx.Node):
        if out.args[0].meta["val"].shape[-1] != width:
            break
        out = out.args[0]  # hidden states in their own shape again
    if out is hidden:
        return None
    if kind_of(out) == NORM and out.args[0] is hidden:
        return entry.leaves[key_of(out)].module
    raise error("what is behind its layers is no norm that Quire has")


def _alike(skeleton: Skeleton, stubs: Stubs, extras: Sequence[Tensor], calls: Calls) -> list[list[int]]:
    """Return the layers of each kind: those with equal modules, settings and inputs."""
    found: dict[str, list[int]] = {}
    for number, layer in enumerate(skeleton.layers):
        found.setdefault(_signature(layer, number, stubs.inputs[number], extras, calls), []).append(number)
    return list(found.values())


def _signature(layer: nn.Module, number: int, inputs: LayerArguments, extras: Sequence[Tensor], calls: Calls) -> str:
    words = [repr(layer)]
    for name, module in layer.named_modules():
        own = {key: _plain(value) for key, value in vars(module).items() if not key.startswith("_")}
        words.append(
            f"{name} {sorted((key, value) for key, value in own.items() if not _is_number(key, value, number))}"
        )
        words += [f"{key} {_digest(value)}" for key, value in module.named_buffers(recurse=False)]
        words += [f"{key} {tuple(value.shape)}" for key, value in module.named_parameters(recurse=False)]
    marks = [f"mask {calls.marks[id(one)]}" for one in tensors_of(inputs.kwargs) if id(one) in calls.marks]
    place = {id(one): i for i, one in enumerate(extras)}
    given = [place[id(one)] for one in tensors_of((inputs.args, inputs.kwargs)) if id(one) in place]
    plain = {name: value for name, value in inputs.kwargs.items() if isinstance(value, int | float | str | None)}
    return "\n".join([*words, *marks, str(given), repr(plain)])


def _plain(value: object) -> object:
    """Return a setting of a module, or the name of a function; None for other objects, which modules share."""
    if isinstance(value, int | float | str | bool | tuple | list | dict):
        return value if isinstance(value, int) else repr(value)
    return getattr(value, "__qualname__", None)


def _digest(buffer: Tensor) -> str:
    if buffer.is_meta:
        return "without numbers"
    numbers = buffer.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(repr((buffer.dtype, buffer.shape)).encode() + numbers).hexdigest()


def _is_number(name: str, value: object, number: int) -> bool:
    """True for an attribute that is the number of the layer."""
    return value == number and type(value) is int and ("idx" in name or "layer" in name or "number" in name)


def _kind(found: Inspected, layers: list[int], traced: TracedGraph, error: Callable[[str], UnsupportedModel]) -> Kind:
    what = f"layer {layers[0]}"
    if len(traced.calls) != 1:
        calls = "calls no attention of transformers" if not traced.calls else f"attends {len(traced.calls)} times"
        near = ": a recurrent layer, or one with code of its own for attention" if not traced.calls else ""
        raise error(f"{what} {calls}{near}")
    if why := traced.calls[0].refused:
        raise error(f"{what}: {why}")
    hidden = inputs_of(traced)["hidden"]
    if outputs_of(traced)[0].meta["val"].shape != hidden.meta["val"].shape:
        raise error(f"{what} returns something else than hidden states")
    try:
        alone = is_row_wise(traced, found.extras)
    except (NotEvaluated, RuntimeError, IndexError) as cause:
        raise error(f"{what} cannot be run on random numbers ({type(cause).__name__})") from None
    if not alone:
        raise error(f"{what} reads other tokens outside of attention")
    heads = find_heads(traced, lambda positions: extras_at(found, positions))
    return Kind(layers, traced, heads, find_halves(traced))


def extras_at(found: Inspected, positions: Tensor) -> list[Tensor]:
    """Return the extra tensors of layers at positions [T]."""
    hidden = inputs_of(found.entry)["hidden"].meta["val"]
    known = {"hidden": torch.zeros(1, len(positions), hidden.shape[2]), "positions": positions[None]}
    outputs = outputs_of(found.entry)[1:]
    values = evaluate(outputs, named_values(found.entry, known)) if outputs else []
    return [positions[None], *values]


def _number_turns(found: Inspected) -> None:
    """Give equal rotations of kinds the same number."""
    at = torch.tensor([0, 1, 5, 63, 17])
    seen = list[tuple[tuple[int, ...], Tensor, Tensor]]()
    for kind in found.kinds:
        if isinstance(kind.heads, str):
            continue
        order, (cos, sin) = kind.heads.order, kind.heads.turn(at)
        same = [i for i, one in enumerate(seen) if one[0] == order and one[1].equal(cos) and one[2].equal(sin)]
        if not same:
            seen.append((order, cos, sin))
            found.turns.append(kind)
        kind.turn = same[0] if same else len(seen) - 1
