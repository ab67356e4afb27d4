"""Adapters (LoRA) of a model on a device: the memory of their slots, and the products of each linear layer.

Knows slots and matrices. Knows no files, no requests, and not which adapter is in a slot.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.contracts.adapters import Adapter
from quire.kernels.lora import AdapterRows, AdapterWeights


class AdaptedProduct:
    """The products of adapters with the inputs of a linear layer.

    weights   matrices of all slots
    """

    def __init__(self, kernel: Any, weights: AdapterWeights) -> None:
        self.weights, self._kernel = weights, kernel

    def add(self, y: Tensor, x: Tensor, rows: AdapterRows) -> None:
        """Add B (A x) to y [T, N] in place, for the rows of x [T, K] that have an adapter."""
        self._kernel.add(y, x, self.weights, rows)


class AdaptedExpansion:
    """The products of adapters with the up-projection of latent attention, which is applied to queries and to sums.

    A key of head h is W_k c + B_k A c of a latent c, and a value W_v c + B_v A c. So a query's product with a latent
    gets q B_k A more, and a sum of values B_v A times the sum of latents. All tokens of a sequence have one adapter.

    weights   matrices of all slots: A [slots, R, L], B [slots, H * (P + V), R]
    heads, nope_dim   H and P
    """

    def __init__(self, weights: AdapterWeights, heads: int, nope_dim: int) -> None:
        self._a, self._ranks, self._nope_dim = weights.a, weights.ranks, nope_dim
        self._b = weights.b.unflatten(1, (heads, -1))

    def add_queries(self, latents: Tensor, plain: Tensor, rows: AdapterRows, first: int) -> None:
        """Add q B_k A to latents [n, H, L] in place. plain: q [n, H, P] of the step's rows from `first` on"""
        for slot, own in self._groups(rows, first, len(plain)):
            inner = torch.einsum("nhp,hpr->nhr", plain[own].float(), self._b[slot, :, : self._nope_dim].float())
            latents[own] += (inner @ self._a[slot].float()).to(latents.dtype)

    def add_values(self, out: Tensor, sums: Tensor, rows: AdapterRows, first: int) -> None:
        """Add B_v A sums to out [n, H, V] in place. sums: [n, H, L] of the step's rows from `first` on"""
        for slot, own in self._groups(rows, first, len(sums)):
            inner = sums[own].float() @ self._a[slot].float().t()
            made = torch.einsum("nhr,hvr->nhv", inner, self._b[slot, :, self._nope_dim :].float())
            out[own] += made.to(out.dtype)

    def _groups(self, rows: AdapterRows, first: int, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yield each slot whose adapter changes the layer, and its rows among `count` rows from `first` on."""
        for slot, begin, end in rows.groups:
            own = rows.order[begin:end].long() - first
            own = own[(own >= 0) & (own < count)]
            if len(own) and int(self._ranks[slot]):
                yield slot, own


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

    def view(self, at: int, *shape: int) -> Tensor:
        """Return the matrix [slots, *shape] of all slots, whose numbers begin at `at`."""
        count = 1
        for size in shape:
            count *= size
        return self.memory[:, at : at + count].unflatten(1, shape)

    def put(self, slot: int, held: HeldAdapter) -> None:
        """Copy an adapter to a slot, without waiting for a device."""
        self.memory[slot].copy_(held.numbers, non_blocking=True)
        self.ranks[:, slot].copy_(held.ranks, non_blocking=True)


def attach(model: nn.Module, products: Mapping[str, AdaptedProduct | AdaptedExpansion]) -> None:
    """Give the linear layers of a model their products of adapters, by the layers' names."""
    left = dict(products)
    for module in model.modules():
        at = getattr(module, "at", None) if hasattr(type(module), "adapted") else None
        if at is not None and (product := left.pop(at or "head", None)) is not None:
            module.adapted = product
    assert not left, f"no layer has the adapters of {sorted(left)}"
