"""Adapters (LoRA; Hu et al., 2021) of a linear layer: y += B (A x), for each row by its own adapter, if it has one.

shrink(x [T, K] or [T, modules, K], weights, rows, first=0) -> inner
    The products A x of the rows that have an adapter, in a form that only `expand` of the same module reads:
    inner[t, m, j] = A[slot, m, j] . x[t] (or x[t, m]), summed in float32, with slot = rows.slots[first + t].
expand(y [T, N], inner, weights, rows, first=0)
    Adds to y in place: y[t, n] += sum over j of B[slot, n', j] * inner[t, m, j], for the rows n of each run: m is its
    module, and n' the row of B that belongs to n. Rows without an adapter stay as they are, bit by bit.
prepare(weights)
    Called once for a layer, before its first product.
expand_gated(y [T, 2I], inner, weights, rows, act) -> [T, I]
    The activation of gate and up (`quire.kernels.activation`) behind `expand`, where `fuses(weights)` is True.

y has x's dtype or float32. B has the adapter's scale in it. The products depend on x alone, so `shrink` may run beside
the product of the layer. x and y are the rows first .. first + T - 1 of the step.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

TILE = 16  # rows of an adapter that a program takes: the smallest side of a product on a GPU
TALL, LONG = 64, 1024  # rows of a tile in steps with so many rows: matrices are read less often


class OutputRun(NamedTuple):
    """Outputs first .. first + rows - 1 of a layer, which belong to a module. row: the first of their rows of B"""

    module: int
    first: int
    rows: int
    row: int


@dataclass(frozen=True)
class AdapterWeights:
    """Matrices of all slots for a linear layer, as views of the slots' memory.

    a       [slots, modules, R, K]; of experts [slots, experts, modules, R, K]
    b       [slots, rows, R]; of experts [slots, experts, rows, R]
    ranks   [slots] int32, ranks of the slot's adapter in this layer; 0: it does not change the layer. Of experts
            [slots, experts]
    runs    outputs that adapters may change, ascending
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    runs: tuple[OutputRun, ...]
    tables: dict[tuple[int, int], Tensor] = field(default_factory=dict, compare=False)  # of kernels, see `blocks`

    @property
    def rank(self) -> int:
        """R, the ranks that a module has room for."""
        return self.a.shape[-2]

    def blocks(self, size: int, device: torch.device, unit: int = 1) -> Tensor:
        """Return blocks of at most `size` outputs within a run.

        [blocks, 4] int32: module, first output, outputs, and first row of B; the last three divided by `unit`
        """
        if (size, unit) not in self.tables:
            found = [
                (run.module, (run.first + at) // unit, min(size, run.rows - at) // unit, (run.row + at) // unit)
                for run in self.runs
                for at in range(0, run.rows, size)
            ]
            self.tables[size, unit] = torch.tensor(found, dtype=torch.int32).to(device)
        return self.tables[size, unit]

    def of(self, place: int) -> "AdapterWeights":
        """Return the matrices of the expert at a place."""
        return AdapterWeights(self.a[:, place], self.b[:, place], self.ranks[:, place], self.runs, self.tables)

    @cached_property
    def most_outputs(self) -> int:
        """Outputs of the longest run."""
        return max(run.rows for run in self.runs)

    @cached_property
    def num_outputs(self) -> int:
        """Outputs of all runs."""
        return sum(run.rows for run in self.runs)


@dataclass(frozen=True)
class AdapterRows:
    """Rows of a step, grouped by adapter. On a GPU its tensors keep their addresses from step to step.

    slots    [T] int32, slot of each row; -1: the row has no adapter, or is padding
    order    [T] int32, the rows with an adapter first, slot by slot
    tiles    [most, 3] int32: slot, first index in `order`, and rows of each tile of at most `tile` rows; 0 rows: none
    groups   (slot, first index in `order`, end), known to the host; (): in a captured step, which reads `tiles`
    used     [1] int32, tiles up to the last one with rows; None: all may have some, and tiles without rows may be
             anywhere
    early    True: no kernel that is launched dependently writes these tables, so that kernels may read them before they
             wait for the one before them (`quire.kernels.pdl`)
    tile     rows of a tile at most
    top_k    above 0: rows are pairs of a token and one of its k experts, and a slot is slot * experts + place of the
             expert. Kernels of the step write these tables (`pairs.py`)
    """

    slots: Tensor
    order: Tensor
    tiles: Tensor
    groups: tuple[tuple[int, int, int], ...] = ()
    used: Tensor | None = None
    early: bool = False
    tile: int = TILE
    top_k: int = 0

    def chosen(self, rows: Tensor) -> "AdapterRows":
        """Return these rows [n] of the step alone, in this order. It waits for the device."""
        return grouped(self.slots[rows].cpu().numpy(), self.slots.device)


I32 = np.ndarray[Any, np.dtype[np.int32]]
Groups = tuple[tuple[int, int, int], ...]


def group_rows(slots: I32) -> tuple[I32, Groups]:
    """Return the indices of the rows with an adapter, slot by slot, and (slot, first index, end) of each slot."""
    order = np.argsort(slots, kind="stable").astype(np.int32)
    order = order[np.searchsorted(slots[order], 0) :]
    found, firsts = np.unique(slots[order], return_index=True)
    ends = [*firsts[1:].tolist(), len(order)][: len(found)]
    return order, tuple(zip(found.tolist(), firsts.tolist(), ends, strict=True))


def tiles_of(groups: Groups, tile: int = TILE) -> list[tuple[int, int, int]]:
    """Return the tiles of groups, see `AdapterRows`."""
    return [(slot, first, min(tile, end - first)) for slot, begin, end in groups for first in range(begin, end, tile)]


def tile_of(rows: int) -> int:
    """Return the rows of a tile in a step of `rows` rows."""
    return TALL if rows >= LONG else TILE


def most_tiles(rows: int, groups: int, tile: int = TILE) -> int:
    """Return the most tiles of `rows` rows in at most `groups` groups."""
    return (rows + min(rows, groups) * (tile - 1)) // tile


def grouped(slots: I32, device: torch.device, tile: int = TILE) -> AdapterRows:
    """Return the rows of a step with these slots, which the host knows. Copies to a GPU are no dependent launches."""
    order, groups = group_rows(slots)
    tiles = np.array(tiles_of(groups, tile), np.int32).reshape(-1, 3)
    sent = (torch.from_numpy(one).to(device) for one in (slots, order, tiles))
    return AdapterRows(next(sent), next(sent), next(sent), groups, early=True, tile=tile)
