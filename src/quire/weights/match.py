"""The tensors of a checkpoint paired with the parameters they fill, and the proof that each part comes exactly once.

Decided from the headers, before any byte is read. The loaders fill parameters by it, and `quire explain` tells with it
what they would refuse. No torch.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from quire.config.checkpoint import ModelArgs
from quire.contracts.errors import WeightsError
from quire.layers.params import Param, is_unread
from quire.weights.files import Checkpoint, StoredTensor, read_checkpoint, stored_in

READABLE = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}  # stored type -> PyTorch's
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")
SHOWN = 3  # names in a message before "and N more"


class Slot(NamedTuple):
    """A part of a parameter: its rows (None: all of them), and the shape that the checkpoint must have."""

    parameter: str
    rows: tuple[int, int] | None
    shape: tuple[int, ...]


def match_tensors(checkpoint: Checkpoint, params: Sequence[Param], args: ModelArgs,
                  elsewhere: Collection[str] = frozenset()) -> list[tuple[StoredTensor, Slot]]:
    """Pair the tensors with slots, in the order in which they lie in the files. Both sides must come out even.

    elsewhere   tensors that other ranks own
    Raises WeightsError in one line naming file, tensor and fix.
    """
    slots, found, unknown = dict(_slots(params)), list[tuple[StoredTensor, Slot]](), list[str]()
    for stored in checkpoint.tensors.values():
        if stored.name in slots:
            _check(stored, slots[stored.name])
            found.append((stored, slots[stored.name]))
        elif stored.name not in elsewhere and not is_unread(stored.name, args):
            unknown.append(f"{stored.name} (in {stored.file.name})")
    if missing := sorted(slots.keys() - checkpoint.tensors.keys()):
        raise WeightsError(
            f"{checkpoint.folder} lacks {_some(missing)}: the checkpoint is incomplete, or not of this config.json; "
            "download it again." + _tied_hint(missing)
        )
    if unknown:
        raise WeightsError(f"{_some(unknown)} has no place in a {args.model_type} model with this config.json: "
                           "use the config.json that belongs to these weights.")  # fmt: skip
    order = {path: number for number, path in enumerate(checkpoint.files)}
    return sorted(found, key=lambda pair: (order[pair[0].file], pair[0].offset))


def load_error(folder: Path, params: Sequence[Param], args: ModelArgs, *, quantized: bool) -> str:
    """The words with which a loader refuses the weights in `folder`; "" where it takes them, or where there are none.

    quantized   nothing loads such weights yet, and their parts have other names: only the files are checked
    """
    try:
        stored_in(folder)
        if any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
            checkpoint = read_checkpoint(folder)
            if not quantized:
                match_tensors(checkpoint, params, args)
    except WeightsError as error:
        return str(error)
    return ""


def _slots(params: Sequence[Param]) -> Iterator[tuple[str, Slot]]:
    """Checkpoint name -> slot of every part of every parameter."""
    for param in params:
        first = 0
        for part in param.parts:
            rows = None if len(param.parts) == 1 else (first, part.rows)
            yield part.stored, Slot(param.name, rows, (part.rows, *param.shape[1:]))
            first += part.rows
        assert first == param.shape[0], f"the parts of {param.name} have {first} rows"


def _check(stored: StoredTensor, slot: Slot) -> None:
    if stored.dtype not in READABLE:
        raise WeightsError(f"{stored.file.name}: {stored.name} is stored as {stored.dtype}; quantized weights are not "
                           "implemented yet: use the unquantized checkpoint.")  # fmt: skip
    if stored.shape != slot.shape:
        raise WeightsError(f"{stored.file.name}: {stored.name} has shape {list(stored.shape)}, config.json makes it "
                           f"{list(slot.shape)}: use the config.json that belongs to these weights.")  # fmt: skip


def _tied_hint(names: list[str]) -> str:
    if names != ["lm_head.weight"]:
        return ""
    return " If the model shares its head with the embedding, set tie_word_embeddings to true in config.json."


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
