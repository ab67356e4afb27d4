"""`ExpertWeights`, in which implementations keep the packed weights of an expert, or of all experts of a rank."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from quire.kernels.activation import UNGATED
from quire.kernels.activation.cpu import pointwise
from quire.kernels.experts.form import ExpertForm
from quire.kernels.pack.matrix import Weight

Matrix = TypeVar("Matrix")
Biases = tuple[Tensor, Tensor]


def activated(x: Tensor, act: str, gated: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Return the activation of the first product of experts. gated: computes those with a gate."""
    return pointwise(x, act) if act in UNGATED else gated(x, act)


class ExpertWeights(NamedTuple, Generic[Matrix]):
    """Weights of an expert, or of all E experts of a rank.

    gate_up, down   matrices in the layout of an implementation
    act             activation between the products
    gate_up_bias    [2I], of all experts [E, 2I]; None: no bias
    down_bias       [H], of all experts [E, H]; None: no bias
    """

    gate_up: Matrix
    down: Matrix
    act: str = "silu"
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def form(self) -> ExpertForm:
        """Activation and biases of the experts."""
        return ExpertForm(self.act, self.gate_up_bias is not None)

    def put_biases(self, biases: Biases | None, place: int | None = None) -> None:
        """Copy the biases of an expert into this record; place: its index where the record has all experts.

        Raises ValueError for biases of unbiased experts, and for biased experts without.
        """
        own = self.gate_up_bias, self.down_bias
        if (biases is None) != (own[0] is None):
            raise ValueError(
                "experts: `put` got biases, and `empty` no biased form: pass ExpertForm(biased=True) to `empty`"
                if biases
                else "experts: the form is biased: pass the biases of both products to `put`"
            )
        for room, given, parts in zip(own, biases or (), (2, 1), strict=False):
            assert room is not None
            rows = given.unflatten(0, (parts, -1))
            to = (room if place is None else room[place]).unflatten(0, (parts, -1))
            to[:, : rows.shape[1]].copy_(rows, non_blocking=True)


def empty_biases(
    num_experts: int,
    gate_up: Weight,
    down: Weight,
    device: torch.device,
    form: ExpertForm,
    padded: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Allocate the biases [E, 2I] and [E, H] of experts shaped like `gate_up` and `down`; (None, None): unbiased.

    Biases have the dtype of the weights; those of quantized weights are float32.

    padded   widths to which a layout pads 2I and H; numbers behind the biases, of gate and of up, are zero
    """
    if not form.biased:
        return None, None
    dtype = gate_up.dtype if isinstance(gate_up, Tensor) else torch.float32
    widths = padded or (gate_up.shape[0], down.shape[0])
    first, second = (torch.zeros((num_experts, width), dtype=dtype, device=device) for width in widths)
    return first, second


def each_expert(
    matrices: list[tuple[Matrix, Matrix]], biases: tuple[Tensor, Tensor] | tuple[None, None], act: str
) -> list[ExpertWeights[Matrix]]:
    """Return a record for each expert of its matrices; biases: of all, see `empty_biases`."""
    first, second = biases
    if first is None or second is None:
        return [ExpertWeights(*pair, act) for pair in matrices]
    return [ExpertWeights(*pair, act, *own) for pair, *own in zip(matrices, first, second, strict=True)]
