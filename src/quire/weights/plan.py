"""What a checkpoint's tensors become, decided from the headers before any byte is read: which goes where, and the proof
that each part of each parameter comes exactly once."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from quire.layers.stack import Model
from quire.weights.files import StoredTensor, read_checkpoint
from quire.weights.match import match_tensors

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


@dataclass(frozen=True)
class Place:
    """The rows of a parameter (None: all of it) that a checkpoint tensor fills."""

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
    checkpoint = read_checkpoint(Path(folder))
    wanted, places = match_tensors(checkpoint, model.layout, model.args, model.elsewhere), _places(model)
    order = {path: number for number, path in enumerate(checkpoint.files)}
    wanted.sort(key=lambda stored: (order[stored.file], stored.offset))
    return LoadPlan(tuple((stored, places[stored.name]) for stored in wanted))


def _places(model: Model) -> dict[str, Place]:
    """Checkpoint name -> place of every part of every parameter."""
    parameters, places = dict(model.named_parameters()), {}
    for param in model.layout:
        parameter = parameters.pop(param.name)
        assert parameter.shape == param.shape, f"{param.name} was built as {list(parameter.shape)}"
        first = 0
        for part in param.parts:
            rows = None if len(param.parts) == 1 else (first, part.rows)
            places[part.stored] = Place(parameter, rows)
            first += part.rows
        assert first == param.shape[0], f"the parts of {param.name} have {first} rows"
    assert not parameters, f"the layout lacks {', '.join(parameters)}"
    return places
