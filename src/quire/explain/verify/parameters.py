"""Bit for bit comparison of the parameters with which Quire computes and those of the checkpoint.

Translates tensor names where the reference is of another family. Unpacks the float32 layouts of a CPU to the
checkpoint's order. Reads the loader's files with the safetensors library.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from quire.args.checkpoint import read_checkpoint_config
from quire.contracts.errors import ModelError, UnsupportedModel
from quire.contracts.parallel import Rank
from quire.contracts.params import Param, Part
from quire.kernels.experts.weights import ExpertWeights
from quire.layers.decoder import Decoder
from quire.layers.latent import Expansion
from quire.layers.moe import Experts, Router
from quire.layers.norm import HeadNorm, Norm, WideNorm
from quire.layers.recurrence import Recurrence
from quire.plan.as_stored import as_stored
from quire.plan.layout import layout
from quire.quantization.formats import raw_tensors
from quire.weights.files import full_names, read_checkpoint, stored_in, weight_files
from quire.weights.slices import sliced


@dataclass(frozen=True)
class Changed:
    """A checkpoint tensor whose numbers differ from those with which Quire computes.

    count   numbers that differ
    size    all numbers of the tensor
    most    largest difference, relative to the tensor's largest number
    """

    name: str
    count: int
    size: int
    most: float

    def __str__(self) -> str:
        return f"{self.name}: {self.count:,} of {self.size:,} numbers differ, by up to {self.most:.1e} of the largest"


def reference_layout(params: Sequence[Param], folder: Path, rank: Rank) -> tuple[Param, ...]:
    """Return the parameters of a rank with the tensor names of the checkpoint in `folder`; see `renamed`.

    Raises ModelError for a tensor that the folder lacks.
    """
    named = renamed(params, folder, rank)
    wanted = {part.stored for param in named for raw in raw_tensors(param) for part in raw.parts}
    if missing := sorted(wanted - stored_in(folder).keys()):
        raise ModelError(
            f"the reference {folder} has no tensor {missing[0]}: rename the reference's tensors so that "
            "they are named as in the model that is verified."
        )
    return named


def renamed(params: Sequence[Param], folder: Path, rank: Rank) -> tuple[Param, ...]:
    """Return the parameters of a rank with the tensor names of the checkpoint in `folder`.

    The names follow the model family in the folder's config.json. If Quire does not support the family, the folder must
    use the names in `params`.
    """
    try:
        stored = read_checkpoint(folder).tensors
        theirs = layout(as_stored(read_checkpoint_config(folder), stored, lambda name: stored[name].shape), rank)
    except UnsupportedModel:
        return tuple(params)
    parts = {param.name: param.parts for param in theirs}
    return tuple(replace(param, parts=parts.get(param.name, param.parts)) for param in params)


def changed_parameters(model: Decoder, folder: Path, rank: Rank) -> tuple[Changed, ...]:
    """Return a `Changed` for every tensor in `folder` that is not exactly the one with which `model` computes.

    rank   whose parameters the model has
    Matrices that are quantized in memory are left out: their packed layouts cannot be unpacked.
    """
    from safetensors import safe_open

    params = renamed(model.layout, folder, rank)
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, "pt")) for path in weight_files(folder)]
        holders = {name: file for file in files for name in file.keys()}  # noqa: SIM118  not a dict
        stored = {full: partial(holders[name].get_tensor, name) for name, full in full_names(holders).items()}
        return tuple(
            found
            for name, part, ours in _parameters(model, params)
            if (found := _compare(name, ours, sliced(stored[part.stored]().view(part.shape), part).float())) is not None
        )


def _compare(name: str, ours: Tensor, theirs: Tensor) -> Changed | None:
    ours = ours.cpu()
    if ours.shape[-theirs.dim() :] != theirs.shape:
        return Changed(name, ours.numel(), ours.numel(), float("inf"))
    differ = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    count = int(differ.sum())
    most = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(torch.finfo(torch.float32).tiny))
    return Changed(name, count, ours.numel(), most) if count else None


def _parameters(model: Decoder, params: tuple[Param, ...]) -> Iterator[tuple[str, Part, Tensor]]:
    """Yield (name, part, float32 tensor) for every slice of `params`, read back from the model's memory.

    The name is that of the model's checkpoint; where it stores experts in another form, that of the part.
    Norms of heads are [H, D]: H heads, D numbers per head. Matrices that are quantized in memory are left out.
    """
    for own, param in zip(model.layout, params, strict=True):
        alike = len(own.parts) == len(param.parts)
        names = [part.stored for part in (own if alike else param).parts]
        if param.scheme is not None:
            continue
        rows, first = _packed(model.owner(param.module), param.name.rpartition(".")[2]), 0
        for name, part in zip(names, param.parts, strict=True):
            yield name, part, rows if len(param.parts) == 1 else rows[first : first + part.rows]
            first += part.rows


def _packed(owner: Any, name: str) -> Tensor:
    """Return a parameter of a layer, with the rows of the layout."""
    if isinstance(owner, Experts):
        if (found := owner.destination()) is not None:
            return found[name]
        packed: Any = owner.packed
        if isinstance(packed, ExpertWeights):  # of all experts
            return _dense(getattr(packed, name)).flatten(0, 1)
        each = packed if isinstance(packed, list) else packed[0]  # some kernels keep the memory of all beside them
        return torch.cat([_dense(getattr(one, name)) for one in each])
    if isinstance(owner, HeadNorm | WideNorm | Recurrence):
        return owner.rows(name)
    if isinstance(owner, Norm) or (isinstance(owner, Router) and name == "scale"):
        assert owner.stored is not None, "run before its weights were taken"
        return owner.stored
    if isinstance(owner, Expansion):
        return owner.weight.flatten(0, 1)
    packed = getattr(owner, "packed", None)
    value = getattr(owner, name, None)
    value = getattr(packed, name) if value is None else value
    return _dense(value)


def _dense(packed: Any) -> Tensor:
    """Return a packed matrix as it was before packing."""
    if isinstance(packed, Tensor) and not packed.is_mkldnn:
        return packed.detach()
    dense: Tensor = packed.to_dense()
    return dense
