"""Weights stored as numbers: matrices, vectors, and matrices that are quantized when they are loaded. No torch.

A fused projection stacks the output rows of several checkpoint tensors (q, k, v); each one is a part.
"""

from collections.abc import Iterator

from quire.contracts.params import FLOATS, Param, RawTensor


class Unquantized:
    """Format of weights that are stored unquantized. See `WeightFormat` in formats.py."""

    def __init__(self, name: str) -> None:
        self.name = name

    def tensors(self, param: Param) -> tuple[RawTensor, ...]:
        """Return one tensor: the parameter itself. See `WeightFormat`."""
        readable = (*FLOATS, "I64") if param.name == "ids.offsets" else FLOATS
        return (RawTensor(param.name.rpartition(".")[2], param.shape, param.parts, param.dtype, readable),)

    def spare(self, param: Param) -> Iterator[str]:
        """Yield nothing: no tensor is stored beside an unquantized one."""
        yield from ()

    def objection(self, param: Param) -> str:
        """Return the reason why a slice cannot be read: it exceeds the stored tensor; or "". See `WeightFormat`."""
        for part in param.parts:
            end, size = part.start + part.count, part.matrix[part.axis]
            if not 0 <= part.start <= end <= size:
                return f"{part.stored}: {part.start} to {end} of {size}"
        return ""


UNQUANTIZED = Unquantized("unquantized")
ONLINE = Unquantized("online fp8")  # quantized from the numbers as they are loaded
