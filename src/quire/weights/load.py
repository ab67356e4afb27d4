"""The one loader: every file read once, front to back, every tensor copied to the rows its name says.

At the end it proves that each part of each parameter was loaded exactly once and names leftovers on both sides.
"""

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

from quire.contracts.errors import WeightsError
from quire.layers.linear import parameter_rows
from quire.layers.stack import Model
from quire.quantization import unquantized
from quire.weights.files import Checkpoint, StoredTensor, read_checkpoint
from quire.weights.names import NameIndex, Target

Progress = Callable[[int, int], None]  # (bytes done, bytes total)
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
SHOWN = 3  # names in a message before "and N more"


@dataclass(frozen=True)
class LoadReport:
    """What was loaded: tensors, bytes, seconds, and the harmless tensors that were passed over."""

    num_tensors: int
    num_bytes: int
    seconds: float
    skipped: tuple[str, ...]


@dataclass(frozen=True)
class _Place:
    """Where one part goes: rows of a parameter (None: all of it), and the shape the checkpoint must have."""

    parameter: nn.Parameter
    rows: tuple[int, int] | None
    shape: tuple[int, ...]


def load_weights(model: Model, folder: Path, progress: Progress | None = None) -> LoadReport:
    """Fill the parameters of `model` (not packed yet) from the safetensors files in `folder`, converting dtypes.

    Raises WeightsError in one line naming file, tensor and fix. `progress(done, total)` is called after each tensor.
    """
    began = perf_counter()
    checkpoint = read_checkpoint(Path(folder))
    index = NameIndex(model.name_map)
    places = _places(model)
    wanted, skipped = _match(checkpoint, index, places, model)
    targets = {stored.name: target for stored, target in wanted}
    total, done = sum(stored.num_bytes for stored, _ in wanted), 0
    for stored, data in _read(checkpoint, [stored for stored, _ in wanted]):
        place = places[targets[stored.name]]
        unquantized.load(place.parameter.data, data, place.rows)
        done += stored.num_bytes
        if progress is not None:
            progress(done, total)
    return LoadReport(len(wanted), total, perf_counter() - began, skipped)


def _places(model: Model) -> dict[Target, _Place]:
    places = {}
    for name, parameter, rows in parameter_rows(model.named_modules()):
        for part, (first, num_rows) in rows.items():
            whole = num_rows == parameter.shape[0]
            shape = (num_rows, *parameter.shape[1:])
            places[Target(name, part)] = _Place(parameter, None if whole else (first, num_rows), shape)
    return places


def _match(
    checkpoint: Checkpoint, index: NameIndex, places: dict[Target, _Place], model: Model
) -> tuple[list[tuple[StoredTensor, Target]], tuple[str, ...]]:
    """Pair tensors with places before any byte is read. Both sides must come out even."""
    wanted: list[tuple[StoredTensor, Target]] = []
    skipped, unknown = [], []
    for stored in checkpoint.tensors.values():
        target = index.target(stored.name)
        if target is not None and target in places:
            _check(stored, places[target])
            wanted.append((stored, target))
        elif _harmless(stored.name, model):
            skipped.append(stored.name)
        else:
            unknown.append(stored)
    missing = set(places) - {target for _, target in wanted}
    if missing:
        names = sorted(index.stored(target) for target in missing)
        raise WeightsError(
            f"{checkpoint.folder} lacks {_some(names)}: the checkpoint is incomplete, or not of this config.json; "
            "download it again." + _tied_hint(names)
        )
    if unknown:
        names = [f"{stored.name} (in {stored.file.name})" for stored in unknown]
        raise WeightsError(
            f"{_some(names)} has no place in a {model.args.model_type} model with this config.json: "
            "use the config.json that belongs to these weights."
        )
    assert len({target for _, target in wanted}) == len(wanted) == len(places), "a part was loaded twice"
    return wanted, tuple(skipped)


def _check(stored: StoredTensor, place: _Place) -> None:
    if stored.dtype not in DTYPES:
        raise WeightsError(
            f"{stored.file.name}: {stored.name} is stored as {stored.dtype}; quantized weights are not implemented "
            "yet: use the unquantized checkpoint."
        )
    if stored.shape != place.shape:
        raise WeightsError(
            f"{stored.file.name}: {stored.name} has shape {list(stored.shape)}, config.json makes it "
            f"{list(place.shape)}: use the config.json that belongs to these weights."
        )


def _harmless(name: str, model: Model) -> bool:
    """Tensors that older checkpoints store and nobody needs: rotary tables, and the head when it is the embedding."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and model.args.tie_word_embeddings)


def _tied_hint(names: list[str]) -> str:
    if names != ["lm_head.weight"]:
        return ""
    return " If the model shares its head with the embedding, set tie_word_embeddings to true in config.json."


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _read(checkpoint: Checkpoint, wanted: list[StoredTensor]) -> Iterator[tuple[StoredTensor, Tensor]]:
    """Tensors in file order, each a view of the mapped file."""
    by_file: dict[Path, list[StoredTensor]] = {path: [] for path in checkpoint.files}
    for stored in wanted:
        by_file[stored.file].append(stored)
    for path, tensors in by_file.items():
        if not tensors:
            continue
        with path.open("rb") as file:  # the map closes itself when the last tensor that looks into it is gone
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if hasattr(mmap, "MADV_SEQUENTIAL"):
            mapped.madvise(mmap.MADV_SEQUENTIAL)
        for stored in sorted(tensors, key=lambda tensor: tensor.offset):
            count = torch.Size(stored.shape).numel()
            data = torch.frombuffer(mapped, dtype=DTYPES[stored.dtype], count=count, offset=stored.offset)
            yield stored, data.view(stored.shape)
