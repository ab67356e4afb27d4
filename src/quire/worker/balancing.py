"""This rank's part in the balancing of experts: maps and loads of its layers, and the mover of weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.contracts.step import I32, StepPlan
from quire.distributed.expert_moves import ExpertMover, ExpertRanks
from quire.kernels.expert_copies.expert_memory import expert_memory, let_move
from quire.layers.moe import MoE
from quire.worker.features import StepFeature


class RankBalancing(StepFeature):
    """Answers the engine core's messages about experts, and switches layers to new maps.

    layers   number among the layers with experts of all stages -> such a layer of this rank
    shape    layers with experts of all stages, and experts of a layer
    """

    def __init__(
        self, layers: Mapping[int, MoE], shape: tuple[int, int], device: torch.device, ranks: ExpertRanks
    ) -> None:
        self._layers, self._shape, self._device = layers, shape, device
        for layer in layers.values():
            let_move(layer.experts.packed)
            kinds = {
                tuple((one.dtype, one.shape) for one in expert_memory(layer.experts.packed, place))
                for place in range(layer.experts.num_experts)
            }
            assert len(kinds) == 1, f"experts whose weights cannot be copied onto each other: {kinds}"
        self._maps: list[tuple[Tensor, Tensor]] = []  # on the device: a switch copies them without waiting for it
        stream = torch.cuda.Stream() if self._device.type == "cuda" else None
        each = next((layer.experts.num_experts for layer in layers.values()), 0)  # 0: a stage without experts
        self._mover = ExpertMover(ranks, self._memory, each, stream)
        self.parts, self.controls = (self._mover,), {"experts": self.control}

    def before(self, plan: StepPlan) -> None:
        """Switch the layer that the plan names to its new experts and map."""
        if plan.sync is not None and plan.sync.switch >= 0:
            self.switch(plan.sync.switch)

    def results(self, plan: StepPlan, counts: I32 | None, words: I32) -> Mapping[str, Any]:
        """Return the number of layers whose new experts have come."""
        return {"moved": self.moved}

    @property
    def moved(self) -> int:
        """Layers of all new maps so far to which all ranks can switch; -1 after a fault of this rank's mover."""
        return -1 if self._mover.fault is not None else self._mover.told

    def control(self, what: str, **given: Any) -> object:
        """Do what the engine core asks for: "reset", "load" (return counts of tokens), "move" (begin to move weights).

        Counts are [layers][experts], of layers of other stages 0.
        """
        if what == "move":
            return self._move(**given)
        loads = [layer.slots.load for layer in self._layers.values() if layer.slots is not None]
        found = torch.zeros(self._shape, dtype=torch.int64)
        if what == "load" and loads:
            found[list(self._layers)] = torch.stack(loads).cpu()
        for load in loads:
            load.zero_()
        return found.tolist() if what == "load" else None

    def switch(self, layer: int) -> None:
        """Switch a layer to its new experts and map, before the launch of a step."""
        self._mover.switch(layer)
        if layer in self._layers:
            held = self._layers[layer].slots
            assert held is not None, "this layer has no slots"
            held.replace(*self._maps[layer])

    def close(self) -> None:
        """End the mover."""
        self._mover.close()

    def _move(self, moves: Sequence[I32], slots: I32, counts: I32) -> None:
        """Begin to move weights.

        moves    of each layer, [n, 2]: destination slot, source slot;  slots, counts  as in `engine.eplb.ExpertMap`
        """
        made = (torch.from_numpy(np.array(one, np.int32)).to(self._device) for one in (slots, counts))
        self._maps = list(zip(*made, strict=True))
        own = [one if number in self._layers else () for number, one in enumerate(moves)]
        self._mover.begin([[(int(to), int(source)) for to, source in one] for one in own])

    def _memory(self, layer: int, place: int) -> list[Tensor]:
        return expert_memory(self._layers[layer].experts.packed, place)
