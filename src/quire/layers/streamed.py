"""Layers whose weights lie in host memory and come to the device ahead of their use.

A layer's weights have fixed memory of the device: a part of a slot, which it shares with other such layers. So kernels
and CUDA graphs find them at one address. With two slots and the layers 2, 5 and 8 of 9:

    compute   0   1   2   3   4   5   6   7   8
    slot 0    copy of 2 |  copy of 8 (follows layer 2)
    slot 1        copy of 5 (follows the copy of 2)

Knows which layer uses which slot, and the order of copies. Knows no streams.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.kernels.layer_copies import HostBlock, LayerCopies, Piece
from quire.kernels.pack.matrix import leaves
from quire.layers.context import Loads
from quire.layers.linear import Linear
from quire.layers.moe import Experts, Router


@dataclass
class _HostLayer:
    """A layer in host memory. pieces: its copies to its slot"""

    slot: int
    blocks: list[HostBlock] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)


class StreamedLayers:
    """The layers of a rank whose matrices lie in host memory, and the slots of the device to which they come.

    slots   memory of each slot, bytes

    `Decoder.take` calls `took` for each unit that is loaded; `ready` is called once, behind the last one.
    """

    def __init__(self, numbers: Sequence[int], first: int, num_slots: int, copies: LayerCopies) -> None:
        """Make it without weights.

        numbers   numbers of the layers in the model;  first  number of the rank's first layer
        """
        self._first, self._num_slots, self._copies = first, min(num_slots, len(numbers)), copies
        self._taken: Counter[str] = Counter()
        self.slots: list[Tensor] = []
        self._layers = {number - first: _HostLayer(place % self._num_slots) for place, number in enumerate(numbers)}

    def has(self, module: str) -> bool:
        """Return True for a module of these layers."""
        return self._of(module) is not None

    def took(self, module: str, owner: Loads) -> None:
        """Move the packed matrices of a module to host memory when it has all of them; do nothing for other modules.

        Called after each unit, of which experts have one for each.
        """
        layer = self._of(module)
        if layer is None or not isinstance(owner, Linear | Router | Experts):
            return
        self._taken[module] += 1
        if self._taken[module] == (owner.num_experts if isinstance(owner, Experts) else 1):
            tensors = list(leaves(owner.packed))
            assert tensors, f"{module}: a packed weight of an unknown form"
            layer.blocks.append(HostBlock(tensors, owner.device))

    def ready(self, device: torch.device) -> None:
        """Allocate the slots, and let the weights of each layer lie in its slot."""
        size = max(sum(block.num_bytes for block in layer.blocks) for layer in self._layers.values())
        self.slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(self._num_slots)]
        for layer in self._layers.values():
            start = 0
            for block in layer.blocks:
                layer.pieces += block.lie_in(self.slots[layer.slot][start : start + block.num_bytes])
                start += block.num_bytes

    def visited(self, layers: Iterable[int]) -> Iterator[int]:
        """Yield `layers`, indices on this rank, in their order; each is on the device when its number comes.

        The caller launches the work of a layer before it asks for the next one. No copy outlives the pass: all are
        waited for, and nothing follows the last one, so that a CUDA graph can hold the pass.
        """
        order = list(layers)
        ahead = deque(index for index in order if index in self._layers)
        arrivals: dict[int, Callable[[], None]] = {}  # by slot that is in use

        def fill() -> None:
            if ahead:
                self._copies.follow()
            while ahead and (layer := self._layers[ahead[0]]).slot not in arrivals:
                arrivals[layer.slot] = self._copies.copy(layer.pieces)
                ahead.popleft()

        fill()
        for index in order:
            layer = self._layers.get(index)
            if layer is not None:
                arrivals[layer.slot]()
            yield index
            if layer is not None:
                del arrivals[layer.slot]
                fill()

    def bring(self, module: str) -> None:
        """Copy the layer of a module to its slot, for a reader of weights; it stays until the next pass or call."""
        layer = self._of(module)
        if layer is not None:
            self._copies.follow()
            self._copies.copy(layer.pieces)()

    def _of(self, module: str) -> _HostLayer | None:
        """Return the layer of a module: "layers.5.mlp.down" is of layer 5 of the model."""
        name, _, rest = module.partition(".")
        return self._layers.get(int(rest.partition(".")[0]) - self._first) if name == "layers" else None
