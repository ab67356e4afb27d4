"""Load units: groups of parameters that are loaded and packed together, in the order of the layers. No torch."""

from collections.abc import Container, Iterable, Iterator
from itertools import groupby
from math import prod
from typing import NamedTuple

from quire.contracts.params import Param, RawTensor, fused, of_expert
from quire.quantization.formats import FORMATS

ITEM_BYTES = {"float8_e4m3fn": 1, "int8": 1, "uint8": 1, "int32": 4, "float32": 4}  # of the types of raw tensors


class LoadUnit(NamedTuple):
    """Tensors that are loaded and packed together: those of a module, or of one expert of an MoE module.

    place      index of the expert among those of this rank; 0 for a whole module
    params     parameters that the tensors become: those of the module, or of the expert
    in_place   True: the tensors are views of the layer's memory, for all experts at once, and need no packing
    """

    module: str
    place: int
    tensors: tuple[RawTensor, ...]
    params: tuple[Param, ...] = ()
    in_place: bool = False

    def num_bytes(self, item: int) -> int:
        """Return the bytes of the unit's temporary tensors, which are freed when the unit is packed; 0 if `in_place`.

        item   bytes of an element of the model's dtype
        """
        sizes = (prod(raw.shape) * ITEM_BYTES.get(raw.dtype, item) for raw in self.tensors)
        return 0 if self.in_place else sum(sizes)


def load_units(params: Iterable[Param], in_place: Container[str] = ()) -> Iterator[LoadUnit]:
    """Group the parameters of a rank, in their order, into the units in which they are loaded and packed.

    in_place   names of the modules whose weights are loaded directly into the layer's memory; see `Model.destination`
    """
    for module, group in groupby(params, key=lambda param: param.module):
        own = list(group)
        here = module in in_place
        count = fused(own[0])[0] if own[0].shard == "experts" and not here else 1
        for place in range(count):
            params = tuple(of_expert(param, place, count) for param in own)
            raws = (raw for param in params for raw in FORMATS[param.format].tensors(param))
            yield LoadUnit(module, place, tuple(raws), params, here)
