"""Load units: groups of parameters that are loaded and packed together, in the order of the layers. No torch."""

from collections.abc import Container, Iterable, Iterator
from itertools import groupby
from math import prod
from typing import NamedTuple

from quire.contracts.params import Param, RawTensor, fused
from quire.quantization.formats import FORMATS


class LoadUnit(NamedTuple):
    """Tensors that are loaded together: those of a module, or of the expert at `place` on this rank.

    in_place   the tensors are the layer's own memory, for all experts at once, and need no packing
    """

    module: str
    place: int
    tensors: tuple[RawTensor, ...]
    in_place: bool = False

    @property
    def num_elements(self) -> int:
        """Elements of the tensors that are made for the unit and freed when it is packed; 0 in place."""
        return 0 if self.in_place else sum(prod(tensor.shape) for tensor in self.tensors)


def load_units(params: Iterable[Param], in_place: Container[str] = ()) -> Iterator[LoadUnit]:
    """Group the parameters of a rank, in their order, into the units in which they are loaded and packed.

    in_place   modules whose layers have a destination
    """
    for module, group in groupby(params, key=lambda param: param.module):
        own = list(group)
        here = module in in_place
        count = fused(own[0])[0] if own[0].shard == "experts" and not here else 1
        for place in range(count):
            yield LoadUnit(module, place, tuple(raw for param in own for raw in _raw(param, place, count)), here)


def _raw(param: Param, place: int, count: int) -> tuple[RawTensor, ...]:
    """The stored tensors of a parameter, or of the expert at `place` among `count`."""
    each = len(param.parts) // count
    shape, name = (param.shape[0] // count, *param.shape[1:]), param.name.rpartition(".")[2]
    whole = RawTensor(name, shape, param.parts[place * each : (place + 1) * each], param.dtype)
    return FORMATS[param.format].tensors(whole)
