"""Packed weights that are replaced where they lie: addresses stay, and what no address can hold is refused."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.contracts.errors import WeightsError
from quire.layers.in_place import leaves, retake


@dataclass(frozen=True)
class Packed:
    """A weight as a kernel keeps it, and a constant of its launches."""

    data: Tensor
    factor: float


class Layer(nn.Module):
    """A layer with a weight, a view of it, and memory of adapters."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.adapted = torch.ones(3)
        self.packed: tuple[Packed, Tensor | None] = (Packed(torch.zeros(width), 1.0), None)

    def take(self, tensors: dict[str, Any], place: int) -> None:
        weight = tensors["weight"]
        self.packed = Packed(weight, tensors.get("factor", 1.0)), tensors.get("bias")
        self.half = weight[:2]


class Model:
    """A model of one layer."""

    def __init__(self) -> None:
        self.layer = Layer()
        self.take("layer", 0, {"weight": torch.arange(4.0)})

    def owner(self, module: str) -> Layer:
        return self.layer

    def take(self, module: str, place: int, tensors: dict[str, Any]) -> None:
        self.layer.take(tensors, place)


def test_numbers_change_where_they_lie() -> None:
    model: Any = Model()
    old, half = model.layer.packed[0].data, model.layer.half
    at = old.data_ptr()
    retake(model, "layer", 0, {"weight": torch.full((4,), 7.0)})
    assert old.tolist() == [7.0] * 4 and half.tolist() == [7.0] * 2, "whoever kept them reads the new numbers"
    assert model.layer.packed[0].data.data_ptr() == model.layer.half.data_ptr() == at
    assert [path for path, _ in leaves(model.layer)].count(".adapted") == 0


def test_weights_in_a_layout_of_onednn_are_those_of_the_layer() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("no oneDNN")
    model: Any = Model()
    model.take("layer", 0, {"weight": torch.zeros(4), "bias": torch.zeros(4, 4).to_mkldnn()})
    retake(model, "layer", 0, {"weight": torch.ones(4), "bias": torch.ones(4, 4).to_mkldnn()})
    assert model.layer.packed[1].to_dense().all()


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"weight": torch.zeros(5)}, r"packed as torch.float32 \(5,\) and the old ones as torch.float32 \(4,\)"),
        ({"weight": torch.zeros(4).bfloat16()}, "memory that cannot be reused"),
        ({"weight": torch.zeros(8)[::2]}, "memory that cannot be reused"),
        ({"weight": torch.zeros(4), "factor": 2.0}, r"packed.0.factor = 1.0 with the old weights and 2.0"),
        ({"weight": torch.zeros(4), "bias": torch.zeros(4)}, "None with the old weights and a tensor"),
    ],
)
def test_what_recorded_steps_would_not_see_is_refused(tensors: dict[str, Any], words: str) -> None:
    with pytest.raises(WeightsError, match=words):
        retake(Model(), "layer", 0, tensors)  # type: ignore[arg-type]
