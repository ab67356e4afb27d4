"""Adapters (LoRA) of a model on a device: the memory of their slots, and the products of each linear layer.

Knows slots and matrices. Knows no files, no requests, and not which adapter is in a slot.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.contracts.adapters import Adapter
from quire.kernels.lora import AdapterRows, AdapterWeights, OutputRun
from quire.kernels.streams import Fork, side_stream

# Rows of a captured step whose A x is launched behind the layer's product, not before it; both run side by side.
# Llama-3.1-8B on an H200, rank 16, us added per layer of a decode step, before and behind: 1 row 29.2 and 34.5; 64 rows
# 19.9 and 6.4, with 16 adapters 35.9 and 27.6; 256 rows 44.1 and 45.3 (tools/measure_lora.py).
BEHIND = range(17, 129)


class AdaptedProduct:
    """The products of adapters with the inputs of a linear layer.

    weights   matrices of all slots
    """

    def __init__(self, kernel: Any, weights: AdapterWeights) -> None:
        self.weights, self._kernel = weights, kernel
        kernel.prepare(weights)

    def around(self, product: Callable[[], Tensor], x: Tensor, rows: AdapterRows) -> Tensor:
        """Return y = product() with B (A x) added in place, for the rows of x [T, K] that have an adapter."""
        y, inner = self._beside(product, x, rows)
        self._kernel.expand(y, inner, self.weights, rows)
        return y

    def gated(self, product: Callable[[], Tensor], x: Tensor, rows: AdapterRows, act: str, activation: Any) -> Tensor:
        """Return the activation [T, I] of `around`. activation: the kernels of `quire.kernels.activation`"""
        y, inner = self._beside(product, x, rows)
        if self._kernel.fuses(self.weights):
            fused: Tensor = self._kernel.expand_gated(y, inner, self.weights, rows, act)
            return fused
        self._kernel.expand(y, inner, self.weights, rows)
        gated: Tensor = activation.gated(y, act)
        return gated

    def _beside(self, product: Callable[[], Tensor], x: Tensor, rows: AdapterRows) -> tuple[Tensor, Any]:
        """Return product() and A x. In a captured step A x runs beside the product, see `BEHIND`."""
        captured = _captured(x)
        with Fork(side_stream(x.device) if captured else None) as fork:
            y = product() if captured and len(x) in BEHIND else None
            with fork.beside:
                inner = self._kernel.shrink(x, self.weights, rows)
            y = product() if y is None else y
        return y, inner

    def add(self, y: Tensor, x: Tensor, rows: AdapterRows, first: int = 0) -> None:
        """Add B (A x) to y [T, N] in place. x: [T, K], or [T, modules, K], of the step's rows from `first` on"""
        self._kernel.expand(y, self._kernel.shrink(x, self.weights, rows, first), self.weights, rows, first)


def _captured(x: Tensor) -> bool:
    """Return True while a CUDA graph is captured. In an eager step a fork would cost more than it hides."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class AdaptedExpansion:
    """The products of adapters with the up-projection of latent attention, which is applied to queries and to sums.

    A key of head h is W_k c + B_k A c of a latent c, and a value W_v c + B_v A c. So a query's product with a latent
    gets q B_k A more, and a sum of values B_v A times the sum of latents. All tokens of a sequence have one adapter.

    weights   matrices of all slots: A [slots, 1, R, L], B [slots, H * (P + V), R]
    heads, nope_dim   H and P
    """

    def __init__(self, kernel: Any, weights: AdapterWeights, heads: int, nope_dim: int) -> None:
        a, b, width = weights.a[:, 0], weights.b, weights.b.shape[1] // heads
        values, latents = width - nope_dim, a.shape[2]
        keys = b.unflatten(1, (heads, width))[:, :, :nope_dim].transpose(2, 3)  # [slots, H, R, P]
        queries = tuple(OutputRun(head, head * latents, latents, 0) for head in range(heads))
        sums = tuple(OutputRun(head, head * values, values, head * width + nope_dim) for head in range(heads))
        self._queries = AdaptedProduct(kernel, AdapterWeights(keys, a.transpose(1, 2), weights.ranks, queries))
        every = weights.a.expand(-1, heads, -1, -1)
        self._sums = AdaptedProduct(kernel, AdapterWeights(every, b, weights.ranks, sums))

    def add_queries(self, latents: Tensor, plain: Tensor, rows: AdapterRows, first: int) -> None:
        """Add q B_k A to latents [n, H, L] in place. plain: q [n, H, P] of the step's rows from `first` on"""
        self._queries.add(latents.flatten(1), plain, rows, first)

    def add_values(self, out: Tensor, sums: Tensor, rows: AdapterRows, first: int) -> None:
        """Add B_v A sums to out [n, H, V] in place. sums: [n, H, L] of the step's rows from `first` on"""
        self._sums.add(out.flatten(1), sums, rows, first)


class AdaptedExperts:
    """The products of adapters with the routed experts of a layer.

    up, down   matrices of all slots for gate and up, and for down
    """

    def __init__(self, kernel: Any, up: AdapterWeights, down: AdapterWeights) -> None:
        self.up, self.down, self._kernel = up, down, kernel
        kernel.prepare(up)
        kernel.prepare(down)

    def of_step(self, rows: AdapterRows) -> "StepExperts":
        """Return the adapters of the rows of a step."""
        return StepExperts(self, self._kernel, rows)


class StepExperts:
    """Adapters of the rows of a step in the experts of a layer; an `ExpertAdapters` of `quire.kernels.experts`."""

    def __init__(self, own: AdaptedExperts, kernel: Any, rows: AdapterRows) -> None:
        self._own, self._kernel, self._rows = own, kernel, rows

    @property
    def inner(self) -> int:
        """Numbers between the products on this rank."""
        return self._own.down.a.shape[-1]

    def of_expert(self, place: int, tokens: Tensor | None) -> "BetweenProducts":
        """Return the adapters of the expert at `place`, for tokens [n] int64; None: for all of the step."""
        rows = self._rows if tokens is None else self._rows.chosen(tokens)
        return BetweenProducts(self._kernel, self._own.up.of(place), self._own.down.of(place), rows)

    def of_pairs(self, ids: Tensor, expert_map: Tensor | None) -> "BetweenProducts":
        """Return the adapters of all pairs [T * k], in their order, on a GPU. Does not wait for the device."""
        slots, experts = self._own.up.ranks.shape
        rows = self._kernel.pair_rows(ids, expert_map, self._rows.slots, slots, experts)
        return BetweenProducts(self._kernel, self._own.up, self._own.down, rows)


class BetweenProducts(NamedTuple):
    """Adds the products of adapters to those of experts; a `Between` of `quire.kernels.experts`."""

    kernel: Any
    up: AdapterWeights
    down: AdapterWeights
    rows: AdapterRows

    def add_up(self, y: Tensor, x: Tensor) -> None:
        """Add to y [n, 2I], the product of gate and up. x: of the tokens [n, H], or of all pairs [T, H]"""
        self.kernel.expand(y, self.kernel.shrink(x, self.up, self.rows), self.up, self.rows)

    def add_down(self, y: Tensor, h: Tensor, weights: Tensor | None = None) -> None:
        """Add to y [n, H], the product of down with h [n, I]. weights: [T, k] factors of the pairs; None: 1"""
        scales = {} if weights is None else {"scales": weights}
        self.kernel.expand(y, self.kernel.shrink(h, self.down, self.rows, **scales), self.down, self.rows)


class HeldAdapter(NamedTuple):
    """An adapter in host memory: the numbers of a slot, and the ranks of each linear layer [layers] int32."""

    numbers: Tensor
    ranks: Tensor


class AdapterBank:
    """The slots of a rank.

    read     reads an adapter from its files
    memory   [slots, numbers of a slot], in the dtype of the computation
    ranks    [linear layers, slots] int32, ranks of each slot's adapter in each layer
    """

    def __init__(self, read: Callable[[Adapter], HeldAdapter], memory: Tensor, num_linears: int) -> None:
        self.read, self.memory = read, memory
        self.ranks = torch.zeros(num_linears, len(memory), dtype=torch.int32, device=memory.device)

    def view(self, at: int, *shape: int, each: int = 0, experts: int = 1) -> Tensor:
        """Return the matrix [slots, *shape] of all slots, whose numbers begin at `at`.

        each   numbers from a matrix to that of the next expert: the result is [slots, experts, *shape]. 0: one matrix
        """
        whole = self.memory[:, at : at + math.prod(shape)].unflatten(1, shape)
        if not each:
            return whole
        sizes, strides = (len(whole), experts, *shape), (whole.stride(0), each, *whole.stride()[1:])
        return whole.as_strided(sizes, strides)

    def put(self, slot: int, held: HeldAdapter) -> None:
        """Copy an adapter to a slot, without waiting for a device."""
        self.memory[slot].copy_(held.numbers, non_blocking=True)
        self.ranks[:, slot].copy_(held.ranks, non_blocking=True)


def attach(model: nn.Module, products: Mapping[str, AdaptedProduct | AdaptedExpansion | AdaptedExperts]) -> None:
    """Give the linear layers of a model their products of adapters, by the layers' names."""
    left = dict(products)
    for module in model.modules():
        at = getattr(module, "at", None) if hasattr(type(module), "adapted") else None
        if at is not None and (product := left.pop(at or "head", None)) is not None:
            setattr(module, "adapted", product)  # noqa: B010 - of several classes
    assert not left, f"no layer has the adapters of {sorted(left)}"
