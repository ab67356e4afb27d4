"""Linear layers with weights of 4 and 8 bits and bfloat16 activations on Hopper (compute capability 9.0).

Up to `weight_only.words.MOST_ROWS` rows are multiplied with the packed weight; for more, the weight is unpacked for the
product, which cuBLAS runs. A weight whose groups of inputs are no multiple of 32 runs the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.scheme import Scheme
from quire.kernels.linear.epilogue import Epilogue
from quire.kernels.linear.some_hopper import readable
from quire.kernels.linear.weight_only import Packed, run, run_add, run_float, run_gated, way
from quire.kernels.pack.matrix import QuantizedMatrix
from quire.kernels.weight_only import words

__all__ = ["pack", "pack_gated", "run", "run_add", "run_float", "run_gated", "way"]


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
        own = self.words, self.scales, self.zeros
        return words.product(readable(x), *own, into, bits=self.bits, group=self.group, counters=self.counters)

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K] in a floating-point type. See `WeightOnly`."""
        return words.unpack(
            self.words, self.scales, self.zeros, self.shape, dtype, bits=self.bits, group=self.group, gated=self.gated
        )


def pack(matrix: QuantizedMatrix) -> Packed:
    """Return the weight packed in the layout that `run` reads. See `quire.kernels.linear`."""
    return _pack(matrix, False)


def pack_gated(matrix: QuantizedMatrix) -> Packed:
    """Return the weight (rows of gate, then of up) packed for `run_gated`. See `quire.kernels.linear`."""
    return _pack(matrix, True)


def _pack(matrix: QuantizedMatrix, gated: bool) -> Packed:
    (n, k), group = matrix.shape, matrix.scheme.block[1] or matrix.shape[1]
    if group % 32 or k % group:
        return matrix
    zeros = None if matrix.zero is None else words.repack_scales(matrix.zero, gated)
    powers = matrix.scheme.kind == "mxfp4"
    counters = torch.zeros((n // 64 + 2) * words.MOST_ROWS // 128, dtype=torch.int32, device=matrix.values.device)
    return WeightWords(
        words.repack(matrix.values, matrix.scheme.bits, gated, powers),
        (words.repack_powers if powers else words.repack_scales)(matrix.scale, gated),
        zeros,
        None if matrix.order is None else matrix.order.long(),
        counters,
        (n, k),
        matrix.scheme.bits,
        group,
        gated,
        matrix.scheme,
    )
