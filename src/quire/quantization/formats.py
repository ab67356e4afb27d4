"""The formats in which checkpoints store weights, by name: their torch-free halves."""

from typing import Protocol

from quire.contracts.params import Part, RawTensor
from quire.quantization.unquantized import Unquantized


class WeightFormat(Protocol):
    """A format without PyTorch: what is stored, how large it is, where it cannot be cut.

    readable   types of stored tensors, in safetensors' spelling
    """

    name: str
    readable: frozenset[str]

    def tensors(self, whole: RawTensor) -> tuple[RawTensor, ...]:
        """The tensors that a checkpoint stores for a parameter, each with its own parts and slices."""

    def num_bytes(self, shape: tuple[int, ...], item_bytes: int) -> int:
        """Bytes of a parameter of this local shape; item_bytes: of a number of the type that it is loaded in."""

    def objection(self, part: Part) -> str:
        """The reason why this slice of a stored tensor cannot be read; "" when it can."""


FORMATS: dict[str, WeightFormat] = {"unquantized": Unquantized()}
