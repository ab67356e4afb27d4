"""Checks that a checkpoint and a model belong together: every part of every parameter is stored exactly once.

Decided from the headers, before any weight is read. The loader uses the result, and `quire explain` shows an error that
the loader would raise. No torch.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from quire.args.checkpoint import ModelArgs
from quire.args.latent import LatentArgs
from quire.contracts.errors import WeightsError
from quire.contracts.params import Param, Part, RawTensor
from quire.quantization.formats import raw_tensors, spare_names
from quire.weights.files import Checkpoint, StoredTensor, read_checkpoint, stored_in

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")
SHOWN = 3  # names in a message before "and N more"
CACHE_SCALES = (
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".prob_scale",
    ".kv_scale",
    ".output_scale",
    ".k_zero_point",
    ".v_zero_point",
)
COPIES = (".embed_tokens.weight", ".shared_head.head.weight")  # of embedding and head, in an MTP layer
INDEXER = ".self_attn.indexer."  # of a layer that reads the tokens that another one has chosen
SHARED = re.compile(r".*\.self_attn\.[kv]_(proj|norm)\.")  # of a layer that reads the KV of another one
_LAYER = re.compile(r"[a-z_.]*\blayers\.(\d+)\.")


def match_tensors(
    checkpoint: Checkpoint, params: Sequence[Param], args: ModelArgs, elsewhere: Collection[str] = frozenset()
) -> Mapping[str, StoredTensor]:
    """Check that a checkpoint fits the parameters. Return name -> header of every stored tensor that they read.

    The checkpoint must have every tensor that `params` read. Any other tensor must be in `elsewhere` or be one that no
    parameter needs (`is_unread`, `check_spare`).
    elsewhere   names of the tensors that only other ranks read
    Raises WeightsError in one line naming file, tensor and fix.
    """
    parts = {part.stored: (part, raw, param) for param in params for raw in raw_tensors(param) for part in raw.parts}
    spare = frozenset(name for param in params for name in spare_names(param))
    found, unknown = dict[str, StoredTensor](), list[str]()
    for stored in checkpoint.tensors.values():
        if stored.name in parts:
            _check(stored, *parts[stored.name])
            found[stored.name] = stored
        elif stored.name not in elsewhere and stored.name not in spare and not is_unread(stored.name, args):
            unknown.append(f"{stored.name} (in {stored.file.name})")
    if missing := sorted(parts.keys() - found.keys()):
        raise WeightsError(
            f"{checkpoint.folder} lacks {_some(missing)}: the checkpoint is incomplete, or not of this config.json; "
            "download it again." + _hint(missing, args) + (f" No parameter reads {_some(unknown)}." if unknown else "")
        )
    if unknown:
        raise WeightsError(
            f"{_some(unknown)} {'has' if len(unknown) == 1 else 'have'} no place in a {args.model_type} "
            "model with this config.json: use the config.json that belongs to these weights."
        )
    return found


def is_unread(name: str, args: ModelArgs) -> bool:
    """True for a checkpoint tensor that no parameter reads.

    These are those of a model around the language model, rotary tables of older checkpoints, a head that is tied to
    the embedding, scales of a quantized KV cache, projections of keys and values and indexers that another layer has,
    and the layers of multi-token prediction (MTP) that draft nothing. Of the others, and of EAGLE heads, copies of
    embedding and head.
    """
    if args.foreign is not None and any(re.search(pattern, name) for pattern in args.foreign.unread):
        return True
    if (root := args.prediction.root) and name.startswith(root):
        return not args.draft_layers or name.endswith((*COPIES, *CACHE_SCALES))
    if args.wrapper is not None and not name.startswith(args.wrapper.root) and name != args.wrapper.head:
        return True
    if name.endswith(("rotary_emb.inv_freq", *CACHE_SCALES)) or (
        name.endswith("lm_head.weight") and args.tie_word_embeddings
    ):
        return True
    if args.eagle is not None and name.rpartition("embed_tokens.")[2] in ("weight", "lm_head.weight", "d2t", "t2d"):
        return True
    layer = _LAYER.match(name)
    if layer is not None and INDEXER in name and int(layer[1]) < args.num_layers:
        mixer = args.layers[int(layer[1])].mixer
        return isinstance(mixer, LatentArgs) and mixer.index is not None and mixer.index.shared
    if layer is not None and int(layer[1]) < args.num_layers and args.kept_by(int(layer[1])) != int(layer[1]):
        return SHARED.match(name) is not None
    first = args.num_layers + args.draft_layers * (not name.endswith(COPIES))
    return layer is not None and first <= int(layer[1]) < args.num_layers + args.extra_layers


def load_error(folder: Path, params: Sequence[Param], args: ModelArgs) -> str:
    """Return the error that loading the weights in `folder` would raise; "" if they fit, or if there are none."""
    try:
        stored_in(folder)
        if any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
            match_tensors(read_checkpoint(folder), params, args)
    except WeightsError as error:
        return str(error)
    return ""


def _check(stored: StoredTensor, part: Part, raw: RawTensor, param: Param) -> None:
    if stored.dtype not in raw.readable:
        weights = "an unquantized" if param.stored is None else f"a {param.format}"
        raise WeightsError(
            f"{stored.file.name}: {stored.name} is stored as {stored.dtype}, {weights} tensor must be "
            f"{' or '.join(raw.readable)}: use the config.json that belongs to these weights."
        )
    if _trimmed(stored.shape, param) != _trimmed(part.shape, param):
        raise WeightsError(
            f"{stored.file.name}: {stored.name} has shape {list(stored.shape)}, config.json makes it "
            f"{list(part.shape)}: use the config.json that belongs to these weights."
        )


def _trimmed(shape: tuple[int, ...], param: Param) -> tuple[int, ...]:
    """Return a shape without sizes of 1 that checkpoints write or leave out.

    Of a vector these are all; of a quantized parameter the last ones.
    """
    if len(param.shape) == 1:
        return tuple(size for size in shape if size != 1)
    while param.stored is not None and shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _hint(names: list[str], args: ModelArgs) -> str:
    if names == ["lm_head.weight"]:
        return " If the model shares its head with the embedding, set tie_word_embeddings to true in config.json."
    root = args.prediction.root
    behind = [(layer := _LAYER.match(name)) and int(layer[1]) >= args.num_layers for name in names]
    if all(one or (root and name.startswith(root)) for one, name in zip(behind, names, strict=True)):
        return " Without --speculative-config the layer that drafts is not needed."
    return ""


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
