"""Scales of an 8-bit KV cache in a checkpoint: a number for the keys of a layer, and one for its values. No torch.

Their names are those of compressed-tensors (`k_scale`), ModelOpt and older FP8 checkpoints (`k_proj.k_scale`), older
compressed-tensors (`k_proj.output_scale`), and checkpoints with a scale for both (`kv_scale`). Latents have one scale.
"""

from collections.abc import Collection
from math import isfinite, prod

import numpy as np

from quire.args.checkpoint import ModelArgs
from quire.args.layers import AttentionArgs
from quire.contracts.errors import WeightsError
from quire.weights.files import Checkpoint, StoredTensor

Scales = tuple[float, float]
NAMES = tuple(
    (f"{side}_scale", f"{side}_proj.{side}_scale", f"{side}_proj.output_scale", f"attn.{side}_scale", "kv_scale")
    for side in ("k", "v")
)
NUMBERS = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2"}


def scale_names(names: Collection[str], args: ModelArgs) -> list[tuple[str, str]]:
    """Return (name for keys, name for values) of each layer's KV cache scales; [] for a checkpoint without any.

    names   of the checkpoint's tensors
    Raises WeightsError when the checkpoint has only some of the scales.
    """
    found = list[tuple[str, str]]()
    for layer, one in enumerate(args.layers[: args.num_layers]):
        if (source := args.kept_by(layer)) != layer:
            found.append(found[source])
            continue
        if not isinstance(one.mixer, AttentionArgs):  # a recurrent layer keeps no tokens
            found.append(("", ""))
            continue
        at = f"model.layers.{layer}.self_attn."
        k, v = (next((at + name for name in side if at + name in names), "") for side in NAMES)
        found.append((k, k if one.mixer.one_scale else v))
    stored = [name for pair in found for name in pair if name]
    if not stored:
        return []
    for layer, pair in enumerate(found):
        if "" in pair and isinstance(args.layers[layer].mixer, AttentionArgs):
            side = "values" if pair[0] else "keys"
            raise WeightsError(
                f"{stored[0]} is stored, and layer {layer} has no scale for its {side} of the KV cache: "
                "the checkpoint is incomplete; download it again, or set --kv-cache-dtype to the "
                "model's dtype, such as bfloat16."
            )
    return found


def read_scales(checkpoint: Checkpoint, args: ModelArgs) -> list[Scales]:
    """Return (scale of keys, scale of values) of each layer's KV cache; [] for a checkpoint without any.

    Raises WeightsError for a tensor that is not a single positive number.
    """
    names, tensors = scale_names(checkpoint.tensors, args), checkpoint.tensors
    return [(_number(tensors[k]), _number(tensors[v])) if k else (1.0, 1.0) for k, v in names]


def _number(stored: StoredTensor) -> float:
    what = f"{stored.file.name}: {stored.name}"
    if prod(stored.shape) != 1:
        raise WeightsError(
            f"{what} has shape {list(stored.shape)}, and the KV cache has one scale for all keys of a "
            "layer and one for all values: set --kv-cache-dtype to the model's dtype, such as bfloat16."
        )
    if stored.dtype not in NUMBERS:
        raise WeightsError(
            f"{what} is stored as {stored.dtype}, a scale must be {' or '.join(NUMBERS)}: download it again."
        )
    raw = np.frombuffer(stored.read(), NUMBERS[stored.dtype])
    if stored.dtype == "BF16":
        raw = (raw.astype("<u4") << 16).view("<f4")
    scale = float(raw[0])
    if not (isfinite(scale) and scale > 0.0):
        raise WeightsError(
            f"{what} is {scale:g}, a scale must be a positive number: download the checkpoint again, or "
            "set --kv-cache-dtype to the model's dtype, such as bfloat16."
        )
    return scale
