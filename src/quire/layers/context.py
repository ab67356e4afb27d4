"""What layers are given: `Build` once, at construction; `StepContext` at every step."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.kernels.attention import AttentionMeta, KVView
from quire.kernels.native import memory
from quire.kernels.select import Kernels


@dataclass(frozen=True)
class Build:
    """Where parameters live, what they are computed in, and with which kernels."""

    dtype: torch.dtype
    device: torch.device
    kernels: Kernels

    def parameter(self, *shape: int) -> nn.Parameter:
        """An uninitialized parameter for inference."""
        empty = memory.empty(shape, self.dtype, self.device)
        return nn.Parameter(empty, requires_grad=False)


@dataclass
class StepContext:
    """One step of the batch.

    positions   [T] int64, position of each token in its sequence
    attention   who attends to what
    kv          one view per layer, by layer index
    """

    positions: Tensor
    attention: AttentionMeta
    kv: list[KVView]
