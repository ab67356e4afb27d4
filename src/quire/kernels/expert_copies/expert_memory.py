"""The memory of one expert inside packed weights of any implementation, for copies between ranks."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.kernels.experts.weights import ExpertWeights
from quire.kernels.linear.panels import Quantized
from quire.kernels.pack.matrix import leaves


def expert_memory(packed: object, place: int) -> list[Tensor]:
    """Return the tensors that hold the expert at `place`, in an order that is the same for every place and rank.

    packed   weights of this rank's experts: tensors with the experts in the first dimension, lists with an item for
             each expert, and tuples or dataclasses of these
    """
    found: dict[tuple[int, int], Tensor] = {}  # by address: some packed weights have a list of views beside the whole
    for one in _of(packed, place):
        found.setdefault((one.data_ptr(), one.nbytes), one)
    return list(found.values())


def let_move(packed: object) -> None:
    """Bring packed weights into a form in which every expert, on every rank, has tensors of the same dtypes.

    `linear/panels` keeps the scales of a matrix in float16 where that is exact. These become float32 here, which every
    scale is exactly; scales of a byte stay. Tensors that the loader made come into memory of the expert's own.
    """
    if isinstance(packed, list):
        packed[:] = [_movable(one) for one in packed]


def _movable(value: Any) -> Any:
    if isinstance(value, ExpertWeights):
        return ExpertWeights(*map(_movable, value))
    if isinstance(value, Quantized):
        own = {
            name: None if one is None else one.clone()
            for name, one in (
                ("zero", value.zero),
                ("order", value.order),
                ("input_scale", value.input_scale),
                ("factor", value.factor),
            )
        }
        narrow = value.scale.itemsize == 1
        scale = value.scale.clone() if narrow else value.scale.to(torch.float32, copy=True)
        return replace(value, scale=scale, **own)
    quantized = getattr(value, "quantized", None)
    return value if quantized is None else replace(value, quantized=_movable(quantized))


def _of(packed: object, place: int) -> Iterator[Tensor]:
    if isinstance(packed, Tensor):
        yield packed[place]
    elif isinstance(packed, list):
        yield from leaves(packed[place])
    elif isinstance(packed, tuple):
        for part in packed:
            yield from _of(part, place)
    elif is_dataclass(packed):
        for field in fields(packed):
            yield from _of(getattr(packed, field.name), place)
