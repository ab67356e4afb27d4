"""What a parameter is before it has memory: its name, its shape and the checkpoint tensors it is made of. No torch."""

import re
from dataclasses import dataclass

from quire.config.checkpoint import ModelArgs

NameMap = tuple[tuple[str, str, str], ...]  # (checkpoint name, parameter, part); {i}: a layer's index, {e}: an expert's
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint tensor that fills `rows` rows of a parameter, behind those of the parts before it."""

    stored: str
    rows: int


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a model.

    dtype   "float32" where it keeps that whatever the model computes in, else ""
    shard   how tensor parallelism cuts it: "rows" | "columns" of the matrix, "experts" (whole ones), "" (every rank
            has all of it)
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    dtype: str = ""
    shard: str = ""


def is_unread(name: str, args: ModelArgs) -> bool:
    """Whether a checkpoint tensor without a place is one that nobody needs: rotary tables, which older checkpoints
    store; the head when it is the embedding; layers that predict more tokens."""
    if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and args.tie_word_embeddings):
        return True
    layer = _LAYER.match(name)
    return layer is not None and args.num_layers <= int(layer[1]) < args.num_layers + args.extra_layers
