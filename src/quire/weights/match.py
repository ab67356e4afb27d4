"""The tensors of a checkpoint held against the parameters of a model, by their headers alone. No torch."""

from collections.abc import Collection, Sequence

from quire.config.checkpoint import ModelArgs
from quire.contracts.errors import WeightsError
from quire.layers.params import Param, is_unread
from quire.weights.files import AGAIN, Checkpoint, StoredTensor

STORED_DTYPES = ("F32", "BF16", "F16", "F64")  # of weights that are not quantized
SHOWN = 3  # names in a message before "and N more"


def match_tensors(checkpoint: Checkpoint, layout: Sequence[Param], args: ModelArgs,
                  elsewhere: Collection[str] = ()) -> list[StoredTensor]:
    """The tensors that the parameters of `layout` are made of, each exactly once.

    elsewhere   tensors that other ranks own
    Raises WeightsError in one line naming file, tensor and fix: a tensor that is missing, has no place, another shape
    or a type of quantized weights.
    """
    shapes = {part.stored: (part.rows, *param.shape[1:]) for param in layout for part in param.parts}
    wanted, unknown = list[StoredTensor](), list[StoredTensor]()
    for stored in checkpoint.tensors.values():
        if stored.name in shapes:
            _check(stored, shapes[stored.name])
            wanted.append(stored)
        elif stored.name not in elsewhere and not is_unread(stored.name, args):
            unknown.append(stored)
    missing = sorted(shapes.keys() - checkpoint.tensors.keys())
    if missing:
        raise WeightsError(
            f"{checkpoint.folder} lacks {_some(missing)}: the checkpoint is incomplete, or not of this config.json; "
            f"{AGAIN}" + _tied_hint(missing)
        )
    if unknown:
        names = [f"{stored.name} (in {stored.file.name})" for stored in unknown]
        raise WeightsError(f"{_some(names)} has no place in a {args.model_type} model with this config.json: "
                           "use the config.json that belongs to these weights.")  # fmt: skip
    return wanted


def _check(stored: StoredTensor, shape: tuple[int, ...]) -> None:
    if stored.dtype not in STORED_DTYPES:
        raise WeightsError(f"{stored.file.name}: {stored.name} is stored as {stored.dtype}; quantized weights are not "
                           "implemented yet: use the unquantized checkpoint.")  # fmt: skip
    if stored.shape != shape:
        raise WeightsError(f"{stored.file.name}: {stored.name} has shape {list(stored.shape)}, config.json makes it "
                           f"{list(shape)}: use the config.json that belongs to these weights.")  # fmt: skip


def _tied_hint(names: list[str]) -> str:
    if names != ["lm_head.weight"]:
        return ""
    return " If the model shares its head with the embedding, set tie_word_embeddings to true in config.json."


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
