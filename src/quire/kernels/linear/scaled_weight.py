"""The packed form of an 8-bit weight, which the kernels of scaled.py read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.scheme import Scheme


@dataclass(frozen=True)
class Scaled:
    """A packed 8-bit weight.

    values     [N, K] e4m3 or int8; K is a multiple of 128, columns that the model lacks are zeros
    scales     float32: [ceil(N / block), K / 128] for FP8 in blocks; [N] for a scale per channel (block 0)
    block      outputs that share a scale: 128 or 1; 0: a scale per channel
    wide       the scales in cuBLASLt's layout
    rule       rule by which activations are quantized: GROUP, TOKEN or FIXED of `quire.kernels.quantize.triton`
    powers     True: scales of activations are powers of two
    fixed      scale of all activations, one number, for the rule FIXED; None: scales are computed
    counters   int32 zeros, scratch memory of `scaled_some.product`
    scheme     of the weight
    """

    values: Tensor
    scales: Tensor
    wide: Tensor
    block: int
    rule: int
    powers: bool
    fixed: Tensor | None
    counters: Tensor
    scheme: Scheme

    @property
    def most(self) -> int:
        """Largest magnitude of the 8-bit type: 127 of INT8, 448 of FP8."""
        return 127 if self.values.dtype == torch.int8 else 448
