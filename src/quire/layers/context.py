"""Inputs of layers: `Build` once, at construction; `StepContext` at every step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quire.contracts.blocks import KVGroup
from quire.contracts.params import Param
from quire.distributed.mesh import ALONE, RankGroups
from quire.distributed.vocabulary import VocabularySlice
from quire.kernels.attention import AttentionMeta, KVView
from quire.kernels.experts_plan import MoEPlan
from quire.kernels.index import Chosen
from quire.kernels.linear_plan import LinearPlan
from quire.kernels.lora import AdapterRows
from quire.kernels.select import Kernels
from quire.kernels.states import BothViews, StateMeta, StateView


class DecoderModules(Protocol):
    """Modules of a decoder of transformers, in place of those of `layers`. `quire.foreign` makes them."""

    def block(self, layer: int) -> nn.Module:
        """Return a layer of the model, by its number; it is called as a `DecoderBlock`."""

    def entry(self) -> nn.Module | None:
        """Return the operations between embedding and first layer: (hidden [T, hidden], positions [T]) -> hidden."""

    def norm(self) -> nn.Module:
        """Return the norm behind the last layer."""

    def rotary(self) -> Any:
        """Return the rows of positions that the layers read; see `quire.kernels.rope.rotary.Rotaries`."""


@dataclass(frozen=True)
class Build:
    """Everything that a rank's layers need at construction.

    dtype, device   of activations
    kernels      implementation of each operation
    params       parameter name -> its shape on this rank, from which layers take their sizes
    linears      name of a linear layer -> plan of its kernel
    experts      numbers of the experts on this rank, in the order in which they are stacked; None: all experts
    groups       the groups of this rank
    owners       rank in `groups.ep` of each expert; (): no other replica needs the experts of this rank
    vocabulary   this rank's slice of the vocabulary; None: all of it
    layers       first layer of this rank, and the end of its range; None: it has all layers
    moe          kernel and dispatcher of the experts; None: a model without experts
    kv_groups    KV groups of this rank's layers, behind which those of a draft model stand; (): all layers form a group
                 without a sliding window
    before       number of layers before those of the model that is built: for a draft model those of the model
    """

    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    params: Mapping[str, Param]
    linears: Mapping[str, LinearPlan]
    experts: tuple[int, ...] | None = None
    groups: RankGroups = ALONE
    owners: tuple[int, ...] = ()
    vocabulary: VocabularySlice | None = None
    layers: tuple[int, int] | None = None
    moe: MoEPlan | None = None
    kv_groups: tuple[KVGroup, ...] = ()
    before: int = 0

    def group_of(self, layer: int) -> int:
        """Return the number of the KV group of a layer."""
        if not self.kv_groups:
            return 0
        own = self.before + layer - (self.layers[0] if self.layers else 0)  # groups count the layers of this rank
        return next(number for number, group in enumerate(self.kv_groups) if own in group.layers)

    def window(self, group: int) -> int | None:
        """Return the window of a KV group, see `KVGroup`; None: full attention."""
        return self.kv_groups[group].window if self.kv_groups else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the local shape of a parameter."""
        return self.params[name].shape

    def rows(self, name: str) -> list[int]:
        """Return this rank's number of rows of each part of a fused parameter (of QKV: three numbers)."""
        return [part.rows for part in self.params[name].parts]


@runtime_checkable
class Loads(Protocol):
    """A layer with parameters. `at` is its name: "layers.0.mlp.down" for the parameter "layers.0.mlp.down.weight"."""

    at: str

    def take(self, tensors: dict[str, Any], place: int) -> None:
        """Pack the parameters of a `LoadUnit` for the layer's kernel; the layer owns them from now on.

        tensors   parameter name (without the layer's name) -> tensor, or `QuantizedMatrix` if it has a scheme
        place     index of the expert on this rank; 0 for other layers

        Called once for each unit, with all its parameters.
        """


@runtime_checkable
class LoadsInPlace(Loads, Protocol):
    """A layer whose parameter memory the loader can fill directly, without a copy."""

    def destination(self) -> dict[str, Tensor] | None:
        """Return parameter name (without the layer's name) -> memory of the parameter, in its shape.

        The loader writes there instead of calling `take`. None if the layer's kernel has a layout of its own.
        """


@dataclass(frozen=True)
class ReplicaTokens:
    """Tokens of replicas in lock-step in a step, or in a pass of a drafter.

    rows    tokens of each replica, or upper bounds: an exchange pads the rows of its replica. A recording does not know
            them: it has those that were rehearsed
    count   [1] int32 on the device: tokens of this replica, without padding
    bound   upper bound of every replica's tokens, equal on all ranks; 0: `rows` are exact
    """

    rows: tuple[int, ...]
    count: Tensor
    bound: int = 0


@dataclass
class StepContext:
    """Inputs of a step that all layers read.

    positions   [T] int64, position of each token in its sequence
    attention   metadata of attention, one for each KV group
    replicas    tokens of the replicas in lock-step; None: there are no other replicas
    inputs      [T, layers, numbers] further embeddings of the tokens, one for each layer; None: the model has none
    kv          view of what each layer keeps: its KV cache, or its states
    states      metadata of the states of recurrent layers; None: the model has none
    chosen      tokens that rows attend to, by the last layer with an indexer; None: no layer has run one
    reuses      True: indexers write their keys alone, and rows attend to `chosen`, which an earlier pass has chosen
    live        [T] bool, False: no expert computes the row, whose result is not used; None: all rows are live
    adapters    adapter of each row; None: no row has one
    apart       True: each operation has launches of its own, as a trace shows them
    """

    positions: Tensor
    attention: tuple[AttentionMeta, ...]
    kv: Sequence[KVView | StateView | BothViews]
    replicas: ReplicaTokens | None = None
    inputs: Tensor | None = None
    live: Tensor | None = None
    states: StateMeta | None = None
    chosen: Chosen | None = None
    reuses: bool = False
    adapters: AdapterRows | None = None
    apart: bool = False
