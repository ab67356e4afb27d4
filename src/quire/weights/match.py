"""Checks that a checkpoint and a model belong together: every part of every parameter is stored exactly once.

Decided from the headers, before any weight is read. The loader uses the result, and `quire explain` shows an error that
the loader would raise. No torch.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from quire.config.checkpoint import ModelArgs
from quire.contracts.errors import WeightsError
from quire.contracts.params import Param, Part
from quire.quantization.formats import FORMATS
from quire.weights.files import Checkpoint, StoredTensor, read_checkpoint, stored_in

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")
SHOWN = 3  # names in a message before "and N more"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def match_tensors(checkpoint: Checkpoint, params: Sequence[Param], args: ModelArgs,
                  elsewhere: Collection[str] = frozenset()) -> Mapping[str, StoredTensor]:
    """Return the header of every stored tensor that these parameters read, by name.

    Every part must be stored. Every stored tensor must be read here, by another rank, or by none (`is_unread`).
    elsewhere   tensors that other ranks read
    Raises WeightsError in one line naming file, tensor and fix.
    """
    parts = {part.stored: (part, param) for param in params for part in param.parts}
    found, unknown = dict[str, StoredTensor](), list[str]()
    for stored in checkpoint.tensors.values():
        if stored.name in parts:
            _check(stored, *parts[stored.name])
            found[stored.name] = stored
        elif stored.name not in elsewhere and not is_unread(stored.name, args):
            unknown.append(f"{stored.name} (in {stored.file.name})")
    if missing := sorted(parts.keys() - found.keys()):
        raise WeightsError(
            f"{checkpoint.folder} lacks {_some(missing)}: the checkpoint is incomplete, or not of this config.json; "
            "download it again." + _tied_hint(missing)
        )
    if unknown:
        raise WeightsError(f"{_some(unknown)} {'has' if len(unknown) == 1 else 'have'} no place in a {args.model_type} "
                           "model with this config.json: use the config.json that belongs to these weights.")
    return found


def is_unread(name: str, args: ModelArgs) -> bool:
    """True for a checkpoint tensor that no parameter reads.

    These are rotary tables of older checkpoints, a head that is tied to the embedding, and the layers of multi-token
    prediction (MTP).
    """
    if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and args.tie_word_embeddings):
        return True
    layer = _LAYER.match(name)
    return layer is not None and args.num_layers <= int(layer[1]) < args.num_layers + args.extra_layers


def load_error(folder: Path, params: Sequence[Param], args: ModelArgs, *, quantized: bool) -> str:
    """Return the error of a loader for the weights in `folder`; "" where it accepts them, or where there are none.

    quantized   check the files only: quantized tensors have other names, and no loader reads them yet
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


def _check(stored: StoredTensor, part: Part, param: Param) -> None:
    weights = FORMATS[param.format]
    if stored.dtype not in weights.readable:
        raise WeightsError(f"{stored.file.name}: {stored.name} is stored as {stored.dtype}; quantized weights are not "
                           "implemented yet: use the unquantized checkpoint.")  # fmt: skip
    if stored.shape != part.shape:
        raise WeightsError(f"{stored.file.name}: {stored.name} has shape {list(stored.shape)}, config.json makes it "
                           f"{list(part.shape)}: use the config.json that belongs to these weights.")  # fmt: skip
    assert not weights.objection(part), f"{stored.name}: {weights.objection(part)}"


def _tied_hint(names: list[str]) -> str:
    if names != ["lm_head.weight"]:
        return ""
    return " If the model shares its head with the embedding, set tie_word_embeddings to true in config.json."


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
