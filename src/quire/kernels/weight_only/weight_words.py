"""The packed weight of 4 or 8 bits on Hopper, which the kernels of words.py and one_row/ read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.scheme import Scheme
from quire.kernels.linear.epilogue import Epilogue
from quire.kernels.linear.some_hopper import readable
from quire.kernels.one_row import linear as one_row
from quire.kernels.one_row.product import Weight
from quire.kernels.weight_only import words


@dataclass(frozen=True)
class WeightWords:
    """A packed weight [N, K] of 4 or 8 bits, an implementation of `WeightOnly`.

    shape   (N, K)
    order   see `WeightOnly`
    gated   True: eight outputs of gate and eight of up alternate

    Other fields are arguments of `weight_only.words.product`.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    counters: Tensor
    shape: tuple[int, int]
    bits: int
    group: int
    gated: bool
    scheme: Scheme

    @property
    def outputs(self) -> int:
        """Return the number of outputs of a packed weight. See `WeightOnly`."""
        return self.shape[0]

    def product(self, x: Tensor, into: Epilogue) -> Tensor:
        """Multiply x, of few rows, by the packed weight. See `WeightOnly`."""
        if len(x) == 1 and (done := self.one_row(x, into)) is not None:
            return done
        own = self.words, self.scales, self.zeros
        return words.product(readable(x), *own, into, bits=self.bits, group=self.group, counters=self.counters)

    def one_row(self, x: Tensor, into: Epilogue, norm: tuple[Tensor, float] | None = None) -> Tensor | None:
        """Multiply the row x, which `norm` (weight and eps) norms before; None: see `one_row.linear`."""
        own = Weight(self.words, self.scales, self.zeros, into.y.shape[1])
        return one_row.words(x, own, self.bits, self.group, into, norm)

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K] in a floating-point type. See `WeightOnly`."""
        return words.unpack(
            self.words, self.scales, self.zeros, self.shape, dtype, bits=self.bits, group=self.group, gated=self.gated
        )
