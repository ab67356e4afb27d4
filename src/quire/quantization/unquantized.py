"""Weights stored as numbers: matrices, vectors, and matrices that are quantized when they are loaded. No torch.

A fused projection stacks the output rows of several checkpoint tensors (q, k, v); each one is a part.
"""

from collections.abc import Iterator

from quire.contracts.params import Param, RawTensor


class Unquantized:
    """Format of numbers in the model's type. See `WeightFormat` in formats.py."""

    def __init__(self, name: str) -> None:
        self.name = name

    def tensors(self, param: Param) -> tuple[RawTensor, ...]:
        """The parameter itself."""
        return (RawTensor(param.name.rpartition(".")[2], param.shape, param.parts, param.dtype),)

    def spare(self, param: Param) -> Iterator[str]:
        """No tensor is stored beside it."""
        yield from ()

    def objection(self, param: Param) -> str:
        """Refuse a slice beyond the tensor; any other can be read."""
        for part in param.parts:
            end, size = part.start + part.count, part.shape[part.axis]
            if not 0 <= part.start <= end <= size:
                return f"{part.stored}: {part.start} to {end} of {size}"
        return ""


UNQUANTIZED = Unquantized("unquantized")
ONLINE = Unquantized("online fp8")  # quantized from the numbers as they are loaded
