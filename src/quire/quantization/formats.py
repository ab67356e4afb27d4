"""The torch-free halves of the formats in which checkpoints store weights, by name."""

from typing import Protocol

from quire.contracts.params import Part, RawTensor
from quire.quantization.unquantized import Unquantized


class WeightFormat(Protocol):
    """The torch-free half of a weight format: stored tensors, their bytes, and slices that cannot be read.

    readable   types of stored tensors that can be read, in safetensors' spelling
    """

    name: str
    readable: frozenset[str]

    def tensors(self, whole: RawTensor) -> tuple[RawTensor, ...]:
        """Return the tensors that a checkpoint stores for a parameter, each with its own parts and slices."""

    def num_bytes(self, shape: tuple[int, ...], item_bytes: int) -> int:
        """Return the bytes of a parameter of a local shape. item_bytes: of a number in the type it is loaded in."""

    def objection(self, part: Part) -> str:
        """Return the reason why this slice of a stored tensor cannot be read; "" when it can."""


FORMATS: dict[str, WeightFormat] = {"unquantized": Unquantized()}
