"""`run_layers`, the only loop over layers, and `Model`, the protocol of the models that it runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quire.config.checkpoint import ModelArgs
from quire.contracts.params import Param
from quire.contracts.scheme import Scheme
from quire.distributed.vocabulary import VocabularySlice
from quire.kernels.attention import KVView
from quire.kernels.rope.rotary import Rotary, Rotation
from quire.kernels.select import Kernels
from quire.layers.context import ReplicaTokens, StepContext

Tap = Callable[[int | str, Tensor], None]
# Types whose equal values print alike. A module has a set of the names of some buffers.
PLAIN = (int, float, str, bytes, set, torch.dtype, torch.device, type(None), Scheme)


class LogitsHead(Protocol):
    """The projection from hidden states to logits."""

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, hidden] -> [R, V] float32 of this rank's slice of the vocabulary, in `out` where that is given."""

    def whole(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, V] float32 of the whole vocabulary."""


class Layer(Protocol):
    """A layer of a decoder."""

    def __call__(self, hidden: Tensor, rotation: Rotation, ctx: StepContext, kv: KVView) -> Tensor:
        """[T, hidden] -> [T, hidden]; it may reuse the memory of `hidden`."""

    def join(self, ctx: StepContext) -> None:
        """Take part in the exchange with other replicas, in a step without tokens of this one."""


class PredictionLayer(Protocol):
    """A layer that drafts the token after the next."""

    norm: Callable[[Tensor], Tensor]  # [R, hidden] -> [R, hidden], before the model's head

    def __call__(self, tokens: Tensor, states: Tensor, rotation: Rotation, ctx: StepContext, kv: KVView) -> Tensor:
        """Embeddings of tokens, and the model's hidden states at the tokens before them, [T, hidden] -> [T, hidden]."""


class Model(Protocol):
    """A decoder: token ids -> embed -> layers -> norm -> head -> logits."""

    args: ModelArgs
    kernels: Kernels
    layout: Sequence[Param]  # of this rank
    elsewhere: frozenset[str]  # tensors of the checkpoint that other ranks read
    dtype: torch.dtype
    device: torch.device
    embed: Callable[[Tensor], Tensor]  # token_ids [T] -> [T, hidden]
    layers: Sequence[Layer]
    drafts: Sequence[PredictionLayer]  # their KV caches follow those of `layers`
    draft: "Model | None"  # a draft model, whose KV caches come last
    norm: Callable[[Tensor], Tensor]  # [R, hidden] -> [R, hidden], before the head
    head: LogitsHead
    first: bool  # has `embed`
    last: bool  # has `norm` and `head`
    vocabulary: VocabularySlice | None  # that `embed` and `head` hold; None: the whole vocabulary
    rotary: Rotary

    def take(self, module: str, place: int, tensors: dict[str, Any]) -> None:
        """Give the layer named `module` the parameters of a `LoadUnit`; the layer packs them.

        Called once for each unit, before the first step. place: index of the expert on this rank; 0 for other layers
        """

    def destination(self, module: str) -> dict[str, Tensor] | None:
        """Return the parameter memory of the layer named `module` for a loader to fill; None: call `take` instead."""


def run_layers(
    model: Model,
    hidden: Tensor,
    ctx: StepContext,
    layers: Iterable[int] | None = None,
    tap: Tap | None = None,
    *,
    rotation: Rotation | None = None,
) -> Tensor:
    """Run `layers` (default: all) on hidden [T, hidden] -> [T, hidden].

    tap        called with "embed" and the hidden state before the first layer, then with each layer's index and result.
               The next layer may write over the result: clone it to keep it.
    rotation   of ctx.positions, if the caller has it already
    """
    if rotation is None:
        rotation = model.rotary.rows(ctx.positions, hidden.dtype)
    if tap is not None:
        tap("embed", hidden)
    for index in range(len(model.layers)) if layers is None else layers:
        hidden = model.layers[index](hidden, rotation, ctx, ctx.kv[index])
        if tap is not None:
            tap(index, hidden)
    return hidden


def join_layers(model: Model, replicas: ReplicaTokens, layers: Iterable[int] | None = None) -> None:
    """Take part in the exchanges of `layers` (default: all) in a step without tokens of this replica."""
    ctx = StepContext(torch.empty(0, dtype=torch.int64, device=model.device), (), [], replicas)
    for index in range(len(model.layers)) if layers is None else layers:
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
        return type(value), _kind({name: part for name, part in vars(value).items() if name != "at"})  # not its name
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), [_kind(getattr(value, field.name)) for field in fields(value) if field.compare]
    return value if isinstance(value, PLAIN) else id(value)
