"""The KV cache of a device: an array of pages. A layer's cache is a strided view into it.

    arena   | page 0 (padding) | page 1 | page 2 | ...                    num_blocks x page_bytes
    page    | layer a: K | layer a: V | layer b: K | layer b: V | ...     the layers of one group, in its order
    K       | head 0: token 0, token 1, ... | head 1: ... | pad |         [head][token][dim], padded to 256 bytes

A page is contiguous, so moving a block with all its layers is one copy. Every component starts at a multiple of 256
bytes, in memory too. All groups have pages of the same size and share the arena: any group can take any block.
Knows nothing of which request uses which page.
"""

import torch
from torch import Tensor

from quire.contracts.blocks import NULL_BLOCK, PAGE_ALIGN, KVComponent, KVGeometry, KVGroup
from quire.kernels.native import memory
from quire.kvstore.shards import place_layers


class KVArena:
    """KV cache memory of a device: `num_blocks` pages, page 0 included. A page holds a block for the layers of a group.

    On a GPU it is filled with zeros; a CPU allocates a page when it is first written.

    data    [num_blocks * page_bytes] uint8, contiguous, starting at a multiple of 256 bytes
    pages   [num_blocks, page_bytes] uint8, a view of `data`

    empty   makes the memory; None: `memory.empty`

    A page has room for the largest group; the end of the others' pages is unused.
    """

    def __init__(
        self, geometry: KVGeometry, num_blocks: int, device: torch.device, empty: memory.Empty | None = None
    ) -> None:
        assert num_blocks > NULL_BLOCK + 1, "an arena needs the reserved block and a usable one"
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.page_bytes = geometry.page_bytes
        self._places = place_layers(geometry)
        self._groups: dict[int, KVGroup] = {layer: group for group in geometry.groups for layer in group.layers}
        size = num_blocks * self.page_bytes
        raw = (empty or memory.empty)((size + PAGE_ALIGN,), torch.uint8, device)
        self.data = raw.narrow(0, -raw.data_ptr() % PAGE_ALIGN, size)
        self.pages = self.data.view(num_blocks, self.page_bytes)
        # A GPU's kernels read whole blocks: unwritten values must be finite. On a CPU zeroing would allocate all pages.
        (self.pages if device.type == "cuda" else self.pages[NULL_BLOCK]).zero_()

    def views(self, layer: int) -> tuple[Tensor, ...]:
        """Return a view of each component of a layer, [num_blocks, num_heads, entries, head_dim] in its own dtype.

        The stride of the first dimension is a whole page. Offsets exceed 2^31 elements: kernels need 64-bit indices.
        """
        group = self._groups[layer]
        places = zip(group.of(layer), self._places[layer], strict=True)
        return tuple(self._view(component, group.entries, at) for component, at in places)

    def _view(self, component: KVComponent, entries: int, offset: int) -> Tensor:
        typed = self.data.view(getattr(torch, component.dtype))
        dim, item = component.head_dim, component.item_bytes
        size = (self.num_blocks, component.num_heads, entries, dim)
        stride = (self.page_bytes // item, entries * dim, dim, 1)
        return typed.as_strided(size, stride, typed.storage_offset() + offset // item)
