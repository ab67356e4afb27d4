"""Packed weights that are replaced where they lie, so that CUDA graphs and recordings of steps stay valid.

A layer packs new weights as it packed the first ones. The new numbers are then copied to the memory of the old ones,
and the layer's tensors point there. So every format that can be loaded can be replaced, and a layer has memory for its
weights twice while it is replaced.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
import torch
from msgspec import structs
from torch import Tensor, nn

from quire.contracts.errors import WeightsError
from quire.layers.decoder import Decoder

APART = ("adapted",)  # attributes of layers that hold memory of adapters
CONSTANTS = (int, float, str, bytes, type(None))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and the constants of a layer with weights, each with its place. Groups of ranks have none."""
    if type(value).__module__.startswith("quire.distributed"):
        return
    if isinstance(value, (Tensor, *CONSTANTS)):
        yield path, value
        return
    inside: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, nn.Module):
        inside = ((name, one) for name, one in vars(value).items() if name[0] != "_" and name not in APART)
    elif isinstance(value, Mapping):
        inside = iter(value.items())
    elif isinstance(value, list | tuple):
        inside = iter(enumerate(value))
    elif isinstance(value, msgspec.Struct):
        inside = iter(structs.asdict(value).items())
    elif is_dataclass(value) and not isinstance(value, type):
        inside = ((field.name, getattr(value, field.name)) for field in fields(value))
    for name, one in inside:
        yield from leaves(one, f"{path}.{name}")


def packed_tensors(model: Decoder) -> list[Tensor]:
    """Return the tensors of the layers with weights of a model, each once."""
    modules = dict.fromkeys(param.module for param in model.layout)
    found = (value for module in modules for _, value in leaves(model.owner(module)))
    return list({id(one): one for one in found if isinstance(one, Tensor)}.values())


def retake(model: Decoder, module: str, place: int, tensors: dict[str, Any]) -> None:
    """Give the layer named `module` other parameters than it has; see `Decoder.take`. Addresses stay.

    Raises WeightsError when the new weights need other memory, or other constants in the launches of their kernel.
    """
    owner = model.owner(module)
    before = dict(leaves(owner))
    with torch.no_grad():
        model.take(module, place, tensors)
        for path, new in leaves(owner):
            old = before.get(path)
            if isinstance(new, Tensor) and isinstance(old, Tensor):
                _move(new, old, module)
            elif type(new) is not type(old) or (not isinstance(new, Tensor) and new != old):
                raise WeightsError(
                    f"{module}: its kernel has {path[1:]} = {_words(old)} with the old weights and {_words(new)} with "
                    "the new ones, and steps are recorded with it: restart the engine with the new weights."
                )


def _move(new: Tensor, old: Tensor, module: str) -> None:
    """Copy the numbers of `new` to the memory of `old`, and let `new` be a view of this memory."""
    if new is old or (new.layout == old.layout != torch.strided):  # oneDNN's own layout, which no recording reads
        return
    if new.layout == old.layout and new.data_ptr() == old.data_ptr():
        return
    forms = [(one.dtype, one.shape, one.layout) for one in (new, old)]
    if forms[0] != forms[1] or new.stride() != old.stride():
        raise WeightsError(
            f"{module}: the new weights are packed as {new.dtype} {tuple(new.shape)} and the old ones as {old.dtype} "
            f"{tuple(old.shape)}, in memory that cannot be reused: restart the engine with the new weights."
        )
    old.copy_(new)
    new.set_(old)  # type: ignore[call-overload]


def _words(value: object) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)
