"""The torch-free halves of the formats in which checkpoints store weights, by name."""

from collections.abc import Iterator
from math import prod
from typing import Protocol

from quire.contracts.params import Param, Part, RawTensor, first_expert, num_experts, of_expert
from quire.quantization.kfirst import AWQ, GPTQ, GPTQ_V2
from quire.quantization.microscaled import GPT_OSS, MX_PACKED, NV_MODELOPT, NV_PACKED
from quire.quantization.rows import FBGEMM, FLOAT, FP8, INT, MODELOPT, PACKED
from quire.quantization.unquantized import ONLINE, UNQUANTIZED


class WeightFormat(Protocol):
    """A checkpoint format of weights: names and shapes of the tensors that it stores for a parameter. No torch."""

    name: str

    def tensors(self, param: Param) -> tuple[RawTensor, ...]:
        """Return the tensors that a checkpoint stores for a parameter, each with the slices that this rank reads.

        The parameter must be one matrix. For stacked experts, call this for each expert (see `of_expert`).
        """

    def spare(self, param: Param) -> Iterator[str]:
        """Yield names of tensors that a checkpoint may store for the parameter, but that the loader does not need."""

    def objection(self, param: Param) -> str:
        """Return the reason why a slice of this parameter cannot be read alone, such as a cut group; "" without one."""


_ROWS, _COLUMNS = (FP8, FBGEMM, MODELOPT, FLOAT, INT, PACKED), (AWQ, GPTQ, GPTQ_V2)
_MICROSCALED = (GPT_OSS, MX_PACKED, NV_PACKED, NV_MODELOPT)
MARKS = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", "_blocks")  # of quantized modules alone
FORMATS: dict[str, WeightFormat] = {one.name: one for one in (UNQUANTIZED, ONLINE, *_ROWS, *_COLUMNS, *_MICROSCALED)}


def raw_tensors(param: Param) -> Iterator[RawTensor]:
    """Yield the stored tensors of a parameter, with the slices to read; of stacked experts, those of all experts."""
    count = num_experts(param)
    for place in range(count):
        yield from FORMATS[param.format].tensors(of_expert(param, place, count))


def tensor_names(param: Param) -> Iterator[str]:
    """Yield the names of the stored tensors of a parameter, in the order of `raw_tensors`.

    The tensors beside the weight of an expert are named after this weight, in the same way for all experts.
    """
    one = first_expert(param)
    places = {part.name: place for place, part in enumerate(one.parts)}
    ends = [
        (places[part.name], part.stored.removeprefix(_module(one.parts[places[part.name]])))
        for raw in FORMATS[param.format].tensors(one)
        for part in raw.parts
    ]
    for first in range(0, len(param.parts), len(one.parts)):
        modules = [_module(part) for part in param.parts[first : first + len(one.parts)]]
        yield from (modules[place] + end for place, end in ends)


def _module(part: Part) -> str:
    return part.stored.rpartition(".")[0]


def spare_names(param: Param) -> Iterator[str]:
    """Yield names of tensors that a checkpoint may store for a parameter, but that the loader does not need."""
    return FORMATS[param.format].spare(param)


def num_bytes(param: Param, item_bytes: int) -> int:
    """Return the bytes of a parameter before kernels pack it: its values, scales and zero points.

    item_bytes   bytes per number of an unquantized parameter
    """
    if param.scheme is None:
        return prod(param.shape) * item_bytes
    count = num_experts(param)
    return count * param.scheme.num_bytes(param.shape[0] // count, param.shape[1])
