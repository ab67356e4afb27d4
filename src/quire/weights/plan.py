"""The tensors that a loader reads, each with the rows of PyTorch's parameter that it fills."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from quire.layers.stack import Model
from quire.weights.files import StoredTensor, read_checkpoint
from quire.weights.match import READABLE, match_tensors

DTYPES: dict[str, torch.dtype] = {stored: getattr(torch, name) for stored, name in READABLE.items()}


@dataclass(frozen=True)
class Place:
    """The rows of a parameter (None: all of it) that one tensor fills."""

    parameter: nn.Parameter
    rows: tuple[int, int] | None

    @property
    def target(self) -> Tensor:
        """The rows themselves: a contiguous view into the parameter's storage."""
        data = self.parameter.data
        return data if self.rows is None else data.narrow(0, *self.rows)


@dataclass(frozen=True)
class LoadPlan:
    """Every tensor that is read, in the order in which it lies in the files, with its place."""

    tensors: tuple[tuple[StoredTensor, Place], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes to read."""
        return sum(stored.num_bytes for stored, _ in self.tensors)


@dataclass(frozen=True)
class LoadReport:
    """What was loaded, in how long."""

    num_bytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.num_bytes / max(self.seconds, 1e-9) / 1e9
        return f"{self.num_bytes / 1e9:.2f} GB in {self.seconds:.2f} s ({rate:.1f} GB/s)"


def plan_load(model: Model, folder: Path) -> LoadPlan:
    """Pair the tensors of the safetensors files in `folder` with the parameters of `model` (not packed yet).

    Raises WeightsError in one line naming file, tensor and fix.
    """
    parameters = dict(model.named_parameters())
    built, planned = {(name, tuple(one.shape)) for name, one in parameters.items()}, {
        (param.name, param.shape) for param in model.layout}
    assert built == planned, f"the layout and the layers differ: {built ^ planned}"
    pairs = match_tensors(read_checkpoint(Path(folder)), model.layout, model.args, model.elsewhere)
    return LoadPlan(tuple((stored, Place(parameters[slot.parameter], slot.rows)) for stored, slot in pairs))
