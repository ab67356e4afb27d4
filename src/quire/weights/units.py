"""Parameters grouped into the units in which they are loaded and packed, in the order of the layers. No torch."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from math import prod
from typing import NamedTuple

from quire.contracts.params import Param, RawTensor, fused
from quire.quantization.formats import FORMATS


class LoadUnit(NamedTuple):
    """Tensors that a layer packs together: those of a module, or of one expert, number `place` on this rank."""

    module: str
    place: int
    tensors: tuple[RawTensor, ...]

    @property
    def num_elements(self) -> int:
        """Numbers in all tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors)


def load_units(params: Iterable[Param]) -> Iterator[LoadUnit]:
    """Group the parameters of a rank, in their order, into the units in which they are loaded and packed."""
    for module, group in groupby(params, key=lambda param: param.module):
        own = list(group)
        count = fused(own[0])[0] if own[0].shard == "experts" else 1
        for place in range(count):
            yield LoadUnit(module, place, tuple(raw for param in own for raw in _raw(param, place, count)))


def _raw(param: Param, place: int, count: int) -> tuple[RawTensor, ...]:
    """The stored tensors of a parameter, or of the expert at `place` among `count`."""
    each = len(param.parts) // count
    shape, name = (param.shape[0] // count, *param.shape[1:]), param.name.rpartition(".")[2]
    whole = RawTensor(name, shape, param.parts[place * each : (place + 1) * each], param.dtype)
    return FORMATS[param.format].tensors(whole)
