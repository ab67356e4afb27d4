"""What a checkpoint's tensors become, decided from the headers before any byte is read: which goes where, and the proof
that each part of each parameter comes exactly once."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from quire.contracts.errors import WeightsError
from quire.layers.params import is_unread
from quire.layers.stack import Model
from quire.weights.files import Checkpoint, StoredTensor, read_checkpoint

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
SHOWN = 3  # names in a message before "and N more"


@dataclass(frozen=True)
class Place:
    """Where one part goes: rows of a parameter (None: all of it), and the shape the checkpoint must have."""

    parameter: nn.Parameter
    rows: tuple[int, int] | None
    shape: tuple[int, ...]

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
    wanted = _match(checkpoint, _places(model), model)
    order = {path: number for number, path in enumerate(checkpoint.files)}
    wanted.sort(key=lambda pair: (order[pair[0].file], pair[0].offset))
    return LoadPlan(tuple(wanted))


def _places(model: Model) -> dict[str, Place]:
    """Checkpoint name -> place of every part of every parameter."""
    parameters, places = dict(model.named_parameters()), {}
    for param in model.layout:
        parameter = parameters.pop(param.name)
        assert parameter.shape == param.shape, f"{param.name} was built as {list(parameter.shape)}"
        first = 0
        for part in param.parts:
            rows = None if len(param.parts) == 1 else (first, part.rows)
            places[part.stored] = Place(parameter, rows, (part.rows, *param.shape[1:]))
            first += part.rows
        assert first == param.shape[0], f"the parts of {param.name} have {first} rows"
    assert not parameters, f"the layout lacks {', '.join(parameters)}"
    return places


def _match(checkpoint: Checkpoint, places: dict[str, Place], model: Model) -> list[tuple[StoredTensor, Place]]:
    """Pair tensors with places before any byte is read. Both sides must come out even."""
    wanted: list[tuple[StoredTensor, Place]] = []
    unknown = []
    for stored in checkpoint.tensors.values():
        if stored.name in places:
            _check(stored, places[stored.name])
            wanted.append((stored, places[stored.name]))
        elif stored.name not in model.elsewhere and not is_unread(stored.name, model.args):
            unknown.append(stored)
    missing = sorted(places.keys() - checkpoint.tensors.keys())
    if missing:
        raise WeightsError(
            f"{checkpoint.folder} lacks {_some(missing)}: the checkpoint is incomplete, or not of this config.json; "
            "download it again." + _tied_hint(missing)
        )
    if unknown:
        names = [f"{stored.name} (in {stored.file.name})" for stored in unknown]
        raise WeightsError(f"{_some(names)} has no place in a {model.args.model_type} model with this config.json: "
                           "use the config.json that belongs to these weights.")  # fmt: skip
    return wanted


def _check(stored: StoredTensor, place: Place) -> None:
    if stored.dtype not in DTYPES:
        raise WeightsError(f"{stored.file.name}: {stored.name} is stored as {stored.dtype}; quantized weights are not "
                           "implemented yet: use the unquantized checkpoint.")  # fmt: skip
    if stored.shape != place.shape:
        raise WeightsError(f"{stored.file.name}: {stored.name} has shape {list(stored.shape)}, config.json makes it "
                           f"{list(place.shape)}: use the config.json that belongs to these weights.")  # fmt: skip


def _tied_hint(names: list[str]) -> str:
    if names != ["lm_head.weight"]:
        return ""
    return " If the model shares its head with the embedding, set tie_word_embeddings to true in config.json."


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
