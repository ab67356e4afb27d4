"""The packed 8-bit weights of experts, which the kernels of scaled.py and scaled_hopper.py read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.scheme import Scheme
from quire.kernels.experts.weights import ExpertWeights


@dataclass(frozen=True)
class Stack:
    """The 8-bit gate_up or down matrices of all experts, stacked. N (of gate and of up) and K are multiples of 128.

    values   [E, N, K] e4m3 or int8
    scales   float32 [E, N / block, K / 128], or [E, N] for a scale per channel (block 0)
    rule     rule by which activations are quantized: GROUP, TOKEN or FIXED of `quire.kernels.quantize.triton`
    powers   True: scales of activations are powers of two
    fixed    [E] scale of each expert's activations, for the rule FIXED; None: scales are computed
    """

    values: Tensor
    scales: Tensor
    block: int
    rule: int
    powers: bool
    fixed: Tensor | None
    scheme: Scheme

    @property
    def most(self) -> int:
        """Largest magnitude of the 8-bit type: 127 of INT8, 448 of FP8."""
        return 127 if self.values.dtype == torch.int8 else 448


Packed = ExpertWeights[Stack]
