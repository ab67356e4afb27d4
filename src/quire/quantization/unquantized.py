"""Unquantized weights: a matrix and perhaps a bias, stored as kernels compute with them. No torch.

A fused projection stacks the output rows of several checkpoint tensors (q, k, v); each one is a part.
"""

from math import prod

from quire.contracts.params import Part, RawTensor


class Unquantized:
    """See `quire.quantization.formats.WeightFormat`."""

    name = "unquantized"
    readable = frozenset({"F32", "BF16", "F16", "F64"})

    def tensors(self, whole: RawTensor) -> tuple[RawTensor, ...]:
        """The parameter itself."""
        return (whole,)

    def num_bytes(self, shape: tuple[int, ...], item_bytes: int) -> int:
        """Return the bytes; every number has the type that it is loaded in."""
        return prod(shape) * item_bytes

    def objection(self, part: Part) -> str:
        """Refuse a slice beyond the tensor; any other can be read."""
        end, size = part.start + part.count, part.shape[part.axis]
        return "" if 0 <= part.start <= end <= size else f"{part.start} to {end} of {size}"
