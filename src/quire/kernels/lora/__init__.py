"""Adapters (LoRA; Hu et al., 2021) of a linear layer: y += B (A x), for each row by its own adapter, if it has one.

add(y [T, N], x [T, K], weights, rows)
    Adds to y in place: y[t, n] += sum over j of B[slot, n, j] * (A[slot, module(n) * R + j] . x[t]), summed in float32,
    with slot = rows.slots[t]. Rows without an adapter stay as they are, bit by bit. y has x's dtype or float32. B has
    the adapter's scale in it. A row's result does not depend on the other rows of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TILE = 16  # rows of an adapter that a program takes: the smallest side of a product on a GPU


@dataclass(frozen=True)
class AdapterWeights:
    """Matrices of all slots for a linear layer, as views of the slots' memory.

    a       [slots, modules * R, K]
    b       [slots, N, R]
    ranks   [slots] int32, ranks of the slot's adapter in this layer; 0: it does not change the layer
    runs    (module, first row, rows) of the outputs that adapters may change, ascending
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    runs: tuple[tuple[int, int, int], ...]

    @property
    def rank(self) -> int:
        """R, the ranks that a module has room for."""
        return self.b.shape[2]


@dataclass(frozen=True)
class AdapterRows:
    """Rows of a step, grouped by adapter. On a GPU its tensors keep their addresses from step to step.

    slots    [T] int32, slot of each row; -1: the row has no adapter
    order    [T] int32, the rows with an adapter first, slot by slot
    tiles    [most, 3] int32: slot, first index in `order`, and rows of each tile of at most `TILE` rows; 0 rows: none
    groups   (slot, first index in `order`, end), known to the host; (): in a captured step, which reads `tiles`
    """

    slots: Tensor
    order: Tensor
    tiles: Tensor
    groups: tuple[tuple[int, int, int], ...] = ()

    def chosen(self, rows: Tensor) -> "AdapterRows":
        """Return these rows [n] of the step alone, in this order. It waits for the device."""
        return grouped(self.slots[rows].cpu().numpy(), self.slots.device)


Groups = tuple[tuple[int, int, int], ...]


def group_rows(
    slots: "np.ndarray[tuple[int], np.dtype[np.int32]]",
) -> "tuple[np.ndarray[tuple[int], np.dtype[np.int32]], Groups]":
    """Return the indices of the rows with an adapter, slot by slot, and (slot, first index, end) of each slot."""
    order = np.argsort(slots, kind="stable").astype(np.int32)
    order = order[np.searchsorted(slots[order], 0) :]
    found, firsts = np.unique(slots[order], return_index=True)
    ends = [*firsts[1:].tolist(), len(order)]
    return order, tuple(zip(found.tolist(), firsts.tolist(), ends, strict=True))


def tiles_of(groups: Groups) -> list[tuple[int, int, int]]:
    """Return the tiles of groups, see `AdapterRows`."""
    return [(slot, first, min(TILE, end - first)) for slot, begin, end in groups for first in range(begin, end, TILE)]


def grouped(slots: "np.ndarray[tuple[int], np.dtype[np.int32]]", device: torch.device) -> AdapterRows:
    """Return the rows of a step with these slots, which the host knows."""
    order, groups = group_rows(slots)
    tiles = np.array(tiles_of(groups), np.int32).reshape(-1, 3)
    sent: Sequence[Tensor] = [torch.from_numpy(one).to(device) for one in (slots, order, tiles)]
    return AdapterRows(*sent, groups)
