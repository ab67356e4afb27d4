"""What layers are given: `Build` once, at construction; `StepContext` at every step."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.kernels.attention import AttentionMeta, KVView
from quire.kernels.native import memory
from quire.kernels.select import Kernels


@dataclass(frozen=True)
class Build:
    """Where parameters live, what they are computed in, with which kernels; `experts` this rank owns (None: all)."""

    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    experts: tuple[int, ...] | None = None

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialized parameter for inference, by default in the type that the model computes in."""
        empty = memory.empty(shape, dtype or self.dtype, self.device)
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
