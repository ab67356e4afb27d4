"""The states that layers keep of requests, whatever their length: an array of rows. A layer's states are a view of it.

    arena | row of slot 0 | row of slot 1 | ... | row of the dummy slot |         rows x the bytes of a request
    row   | layer a: columns | layer a: matrix | layer b: columns | ...            group by group, in their order

A row is contiguous, so a copy of all states of a request is one copy. Every component starts at a multiple of 256
bytes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quire.contracts.blocks import PAGE_ALIGN, KVGeometry, StateComponent
from quire.kernels.native import memory
from quire.kernels.states import StateView


class CheckpointPages(NamedTuple):
    """The checkpoints of a `StateArena` as pages, by number from 1 on. See `quire.kvstore.mover.PagedMemory`.

    pages   [checkpoints + 1, page_bytes] uint8
    """

    pages: Tensor
    page_bytes: int


class StateArena:
    """Memory of the states of a device, `num_rows` rows. It is not cleared: see `quire.kernels.states`.

    empty  makes the memory; None: `memory.empty`
    rows   [num_rows, state bytes] uint8
    """

    def __init__(
        self, geometry: KVGeometry, num_rows: int, device: torch.device, empty: memory.Empty | None = None
    ) -> None:
        size = geometry.state_bytes
        raw = (empty or memory.empty)((num_rows * size + PAGE_ALIGN,), torch.uint8, device)
        self._data = raw.narrow(0, -raw.data_ptr() % PAGE_ALIGN, num_rows * size)
        self.rows = self._data.view(num_rows, size)
        self._places: dict[int, list[tuple[StateComponent, int]]] = {}
        at = 0
        for group in geometry.states:
            for layer in group.layers:
                for one in group.components:
                    self._places.setdefault(layer, []).append((one, at))
                    at += one.num_bytes

    def checkpoints(self, count: int) -> CheckpointPages:
        """Return the last `count` rows as pages. A device without states has pages of a few bytes, without a use."""
        pages = self.rows[-count - 1 :]
        if not pages.shape[1]:
            pages = torch.zeros(count + 1, PAGE_ALIGN, dtype=torch.uint8, device=pages.device)
        return CheckpointPages(pages, pages.shape[1])

    def view(self, layer: int) -> StateView | None:
        """Return the states of a layer, [num_rows, *shape] of each component in its own dtype; None: it has none."""
        own = {component.name: self._view(component, at) for component, at in self._places.get(layer, ())}
        return StateView(**own) if own else None

    def _view(self, component: StateComponent, offset: int) -> Tensor:
        typed, item = self._data.view(getattr(torch, component.dtype)), component.item_bytes
        strides = [1]
        for size in reversed(component.shape[1:]):
            strides.insert(0, strides[0] * size)
        size = (len(self.rows), *component.shape)
        return typed.as_strided(size, (self.rows.shape[1] // item, *strides), typed.storage_offset() + offset // item)
