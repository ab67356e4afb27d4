"""`run_layers`, the only loop over layers. `Model` is the decoder of every family."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial

import msgspec
import torch
from msgspec import structs
from torch import Tensor, nn

from quire.contracts.scheme import Scheme
from quire.kernels.rope.rotary import Turns
from quire.layers.context import ReplicaTokens, StepContext
from quire.layers.decoder import Decoder as Model

Tap = Callable[[int | str, Tensor], None]
# Types whose equal values print alike. A module has a set of the names of some buffers.
PLAIN = (int, float, str, bytes, set, range, torch.dtype, torch.device, type(None), Scheme)


def embedded(model: Model, token_ids: Tensor, ctx: StepContext) -> tuple[Tensor, StepContext]:
    """Return the input [T, hidden] of the layers for ids [T], and the step with the further inputs of the layers."""
    hidden = entered(model, model.embed(token_ids), ctx)
    if model.inputs is None:
        return hidden, ctx
    return hidden, replace(ctx, inputs=model.inputs(token_ids, hidden, ctx))


def entered(model: Model, hidden: Tensor, ctx: StepContext) -> Tensor:
    """Return embeddings [T, hidden] after the operations that stand between them and the first layer, if any do."""
    if model.entry is None:
        return hidden
    result: Tensor = model.entry(hidden, ctx.positions)
    return result


def run_layers(
    model: Model,
    hidden: Tensor,
    ctx: StepContext,
    layers: Iterable[int] | None = None,
    tap: Tap | None = None,
    *,
    turns: Turns | None = None,
) -> Tensor:
    """Run `layers` (default: all) on hidden [T, hidden] -> [T, hidden].

    tap        called with "embed" and the hidden state before the first layer, then with each layer's index and result.
               The next layer may write over the result: clone it to keep it.
    turns      of ctx.positions, if the caller has them already
    """
    if turns is None:
        turns = model.rotary.rows(ctx.positions, hidden.dtype)
    if tap is not None:
        tap("embed", hidden)
    for index in model.visited(range(len(model.layers)) if layers is None else layers):
        hidden = model.layers[index](hidden, turns, ctx, ctx.kv[index])
        if tap is not None:
            tap(index, hidden)
    return hidden


def join_layers(model: Model, replicas: ReplicaTokens, layers: Iterable[int] | None = None) -> None:
    """Take part in the exchanges of `layers` (default: all) in a step without tokens of this replica."""
    ctx = StepContext(torch.empty(0, dtype=torch.int64, device=model.device), (), [], replicas)
    for index in model.visited(range(len(model.layers)) if layers is None else layers):
        model.layers[index].join(ctx)


def first_of_each_kind(layers: Iterable[object]) -> list[int]:
    """Return the index of the first layer of each kind. A warm-up of these layers launches every kernel.

    Layers of a kind differ only in the numbers in their tensors, so they launch the same kernels.
    """
    first: dict[str, int] = {}
    for index, layer in enumerate(layers):
        first.setdefault(repr(_kind(layer)), index)
    return list(first.values())


def _kind(value: object) -> object:
    """Reduce `value` to the parts that decide which kernels run. A value of an unknown type equals only itself."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride(), value.data_ptr() % 16
    if isinstance(value, Mapping):
        return {name: _kind(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_kind(part) for part in value]
    if isinstance(value, partial):
        return _kind([value.func, value.args, value.keywords])
    if isinstance(value, nn.Module):
        own = {name: part for name, part in vars(value).items() if name not in ("at", "number")}  # of the layer
        return type(value), _kind(own)
    if isinstance(value, msgspec.Struct):
        return type(value), _kind(structs.asdict(value))
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), [_kind(getattr(value, field.name)) for field in fields(value) if field.compare]
    return value if isinstance(value, PLAIN) else id(value)
