"""What a parameter is before it has memory: its name, its shape and the checkpoint tensors it is made of. No torch."""

import re
from dataclasses import dataclass

from quire.config.checkpoint import ModelArgs
from quire.config.placement import Parallel

NameMap = tuple[tuple[str, str, str], ...]  # (checkpoint name, parameter, part); {i}: a layer's index, {e}: an expert's
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint tensor that fills `rows` rows of a parameter, behind those of the parts before it.

    name   "q" of a fused parameter, "3.gate" of expert 3; "" of the only part
    """

    stored: str
    rows: int
    name: str = ""


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


def fused(param: Param) -> tuple[int, tuple[tuple[str, int], ...]]:
    """The number of experts that a parameter stacks (1 of every other one), and the parts of one: (name, rows)."""
    stem = param.parts[0].name.rpartition(".")[0]
    own = [part for part in param.parts if part.name.rpartition(".")[0] == stem]
    return len(param.parts) // len(own), tuple((part.name.rpartition(".")[2], part.rows) for part in own)


def cut(param: Param, parallel: Parallel) -> str:
    """The way in which ranks divide a parameter: "rows", "columns", either of each expert, whole "experts", or "" where
    every rank has all of it."""
    if param.shard == "experts" and parallel.experts:
        return "experts" if parallel.expert_ranks > 1 else ""
    sliced = "columns of each expert" if param.name.endswith(".down") else "rows of each expert"
    return "" if parallel.tp == 1 else sliced if param.shard == "experts" else param.shard


def is_unread(name: str, args: ModelArgs) -> bool:
    """Whether a checkpoint tensor without a place is one that nobody needs: rotary tables, which older checkpoints
    store; the head when it is the embedding; multi-token-prediction (MTP) layers."""
    if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and args.tie_word_embeddings):
        return True
    layer = _LAYER.match(name)
    return layer is not None and args.num_layers <= int(layer[1]) < args.num_layers + args.extra_layers
