"""The torch-free halves of the formats in which checkpoints store weights, by name."""

from collections.abc import Iterator
from math import prod
from typing import Protocol

from quire.contracts.params import Param, RawTensor, fused, of_expert
from quire.quantization.kfirst import AWQ, GPTQ, GPTQ_V2
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


FORMATS: dict[str, WeightFormat] = {
    one.name: one for one in (UNQUANTIZED, ONLINE, FP8, FBGEMM, MODELOPT, FLOAT, INT, PACKED, AWQ, GPTQ, GPTQ_V2)
}


def raw_tensors(param: Param) -> Iterator[RawTensor]:
    """Yield the stored tensors of a parameter, with the slices to read; of stacked experts, those of all experts."""
    count = fused(param)[0] if param.shard == "experts" else 1
    for place in range(count):
        yield from FORMATS[param.format].tensors(of_expert(param, place, count))


def spare_names(param: Param) -> Iterator[str]:
    """Yield names of tensors that a checkpoint may store for a parameter, but that the loader does not need."""
    return FORMATS[param.format].spare(param)


def num_bytes(param: Param, item_bytes: int) -> int:
    """Return the bytes of a parameter before kernels pack it: its values, scales and zero points.

    item_bytes   bytes per number of an unquantized parameter
    """
    if param.scheme is None:
        return prod(param.shape) * item_bytes
    count = fused(param)[0] if param.shard == "experts" else 1
    return count * param.scheme.num_bytes(param.shape[0] // count, param.shape[1])
