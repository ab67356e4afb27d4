"""Steps of recurrent layers with one projection before their kernel: Mamba 2 and short convolutions."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire.explain.verify.recording import on_sum, pieces_of
from quire.explain.verify.step_kinds.interfaces import HalfSteps, Keep, Parts
from quire.layers.mamba import Mamba
from quire.layers.shortconv import ShortConv


class ScanSteps(HalfSteps):
    """The steps of such a layer. A `HalfSteps`.

    name   of the layer's parameters, and of the reference's module
    others more names of that module
    inner  name of the step between the two projections
    """

    def __init__(self, name: str, inner: str, *others: str) -> None:
        rooms = (name, *others)
        output = tuple(f"{one}.out_proj" for one in rooms)
        self.room = self.name = name
        self.inner = inner
        self.paths: Mapping[str, tuple[str, ...]] = {
            "in_proj": tuple(f"{one}.in_proj" for one in rooms),
            "out_proj": output,
        }
        self.inputs: Mapping[str, tuple[str, ...]] = {inner: output}

    def watch(self, layer: Mamba | ShortConv, keep: Keep, parts: Parts) -> None:
        """Record the first projection, the result of the kernel, and its projection."""
        own = parts[f"{self.name}.input.weight"]

        def projected(module: Any, given: Any, result: Tensor) -> None:
            keep("in_proj", torch.cat(pieces_of(result, own, layer.output.tp), 1))

        layer.input.register_forward_hook(projected)
        on_sum(layer.output, keep, self.inner, "out_proj")
