"""Memory for loaded or generated tensors, until their layer packs them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.kernels.native import memory
from quire.kernels.pack.convert import Findings, convert
from quire.kernels.pack.matrix import Weight
from quire.layers.in_place import retake
from quire.layers.stack import Model
from quire.weights.units import LoadUnit, load_units


class Unpacked:
    """Memory on `device` for a model's weights while they are loaded, before the layers pack them.

    The weights are loaded in units (`LoadUnit`). Some MoE layers offer their own memory (`Model.destination`): all
    experts of such a layer are one unit, which is loaded in place. Other units get new tensors; `done` gives them to
    the layer.

    again   True: the layers have weights already, which are replaced where they lie
    """

    def __init__(self, model: Model, device: torch.device, *, again: bool = False) -> None:
        self._model, self._device, self._findings, self._again = model, device, Findings(), again
        modules = dict.fromkeys(param.module for param in model.layout if device.type == model.device.type)
        found = {module: model.destination(module) for module in modules}
        self._own = {module: tensors for module, tensors in found.items() if tensors is not None}

    def units(self) -> Iterator[LoadUnit]:
        """Return the units, in the order of the layers."""
        return load_units(self._model.layout, self._own)

    def tensors(self, unit: LoadUnit) -> dict[str, Tensor]:
        """Return the tensors of a unit for the caller to fill: name inside the module -> tensor."""
        if unit.in_place:
            return self._own[unit.module]
        return {
            raw.name: memory.empty(
                raw.shape, getattr(torch, raw.dtype) if raw.dtype else self._model.dtype, self._device
            )
            for raw in unit.tensors
        }

    def done(self, unit: LoadUnit, tensors: dict[str, Tensor]) -> None:
        """Convert a unit's filled tensors and give them to its layer, which packs them. If `in_place`, do nothing."""
        if unit.in_place:
            return
        weights = dict[str, Weight]()
        with torch.no_grad():
            for param in unit.params:
                own = param.name.rpartition(".")[2]
                loaded = {name: tensors.pop(name) for name in list(tensors) if name.partition(".")[0] == own}
                weights[own] = convert(param, loaded, self._model.dtype, self._findings, memory.empty)
        if self._again:
            retake(self._model, unit.module, unit.place, weights)
        else:
            self._model.take(unit.module, unit.place, weights)

    def check(self) -> None:
        """Raise WeightsError if `done` found invalid numbers in a quantized tensor. Call this after the last unit."""
        self._findings.check()
