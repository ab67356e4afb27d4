"""The parameters that Quire computes with, in the checkpoint's order, held against the checkpoint bit for bit.

Undoes what `pack` does in float32 on a CPU; reads the files with the safetensors library, not with Quire's loader.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.layers.attention import head_order
from quire.layers.decoder import Decoder


@dataclass(frozen=True)
class Changed:
    """A tensor of the checkpoint that Quire computes with other numbers: `count` of `size` differ, by at most `most`
    relative to the tensor's largest number."""

    name: str
    count: int
    size: int
    most: float

    def __str__(self) -> str:
        return f"{self.name}: {self.count:,} of {self.size:,} numbers differ, by up to {self.most:.1e} of the largest"


def changed_parameters(model: Decoder, folder: Path) -> tuple[Changed, ...]:
    """Every tensor of the checkpoint in `folder` that is not bit for bit what the packed `model` computes with.

    A tensor that the folder does not have counts as changed.
    """
    from safetensors import safe_open

    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, "pt")) for path in sorted(folder.glob("*.safetensors"))]
        holders = {name: file for file in files for name in file.keys()}  # noqa: SIM118  not a dict
        return tuple(found for name, ours in parameters(model)
                     if (found := _compare(name, ours, holders)) is not None)  # fmt: skip


def _compare(name: str, ours: Tensor, holders: dict[str, Any]) -> Changed | None:
    theirs = holders[name].get_tensor(name).float() if name in holders else torch.full(ours.shape[-1:], torch.nan)
    if ours.shape[-theirs.dim() :] != theirs.shape:
        return Changed(name, ours.numel(), ours.numel(), float("inf"))
    apart = (ours - theirs).abs()
    count = int((apart != 0).sum())
    most = float(apart.max() / theirs.abs().max().clamp_min(torch.finfo(torch.float32).tiny))
    return Changed(name, count, ours.numel(), most) if count else None


def parameters(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, float32 tensor) of every part of every parameter, from the packed model."""
    for param in model.layout:
        rows = _plain(model, param.name)
        first = 0
        for part in param.parts:
            single = len(param.parts) == 1
            yield part.stored, rows if single else rows[first : first + part.rows]
            first += part.rows


def _plain(model: Decoder, name: str) -> Tensor:
    """A parameter of the layout in the order of the checkpoint. Norms of heads are [H, D], one row for each head."""
    path, _, kind = name.rpartition(".")
    inside, _, what = path.rpartition(".")
    if inside.endswith("attention"):
        layer = model.get_submodule(inside)
        return _latent(layer, what, kind) if model.args.latent else _attention(layer, what, kind)
    owner: Any = model.get_submodule(path)
    if what == "experts":
        return torch.cat([one[kind == "down"] for one in owner.packed])
    return _of(owner, kind)


def _of(owner: Any, kind: str) -> Tensor:
    """The weight or bias of a module, packed or not."""
    packed = getattr(owner, "packed", None)
    value = getattr(owner, kind) if packed is None or getattr(owner, kind) is not None else getattr(packed, kind)
    return value.to_dense() if value.is_mkldnn else value.detach()


def _attention(layer: Any, what: str, kind: str) -> Tensor:
    plain = head_order(layer.rotary_dim, layer.head_dim).argsort()
    turned = layer.num_heads + layer.num_kv_heads
    if what in ("q_norm", "k_norm"):
        rows: Tensor = layer.head_norm[..., plain]
        return rows[: layer.num_heads] if what == "q_norm" else rows[layer.num_heads :]
    found = _of(getattr(layer, what), kind)
    if what != "qkv":
        return found
    heads = found.unflatten(0, (-1, layer.head_dim))
    return torch.cat((heads[:turned][:, plain], heads[turned:])).flatten(0, 1)


def _latent(layer: Any, what: str, kind: str) -> Tensor:
    sizes = layer.sizes
    first = "q" if layer.q_down is None else "q_down"
    split = -(sizes.kv_rank + sizes.rope_dim)
    if what == "kv_up":
        up: Tensor = layer.up.flatten(0, 1)
        return up
    if what not in ("q", "q_down", "kv_down"):
        return _of(getattr(layer, what), kind)
    found = _of(getattr(layer, first if what == "kv_down" else what), kind)
    if what == "kv_down":
        found = found[split:]
    elif what == first:
        found = found[:split]
    if not sizes.interleaved or what == "q_down":
        return found
    heads = found[None].clone() if what == "kv_down" else found.unflatten(0, (layer.num_heads, -1)).clone()
    one, other = heads[:, -sizes.rope_dim :].chunk(2, 1)
    heads[:, -sizes.rope_dim :] = torch.stack((one, other), 2).flatten(1, 2)
    return heads.flatten(0, 1)
