"""The layout of most kernels: unchanged weights of all experts, stacked: [experts, 2I, H] and [experts, H, I]."""

import torch
from torch import Tensor

Packed = tuple[Tensor, Tensor]


def empty(num_experts: int, gate_up: Tensor, down: Tensor, device: torch.device) -> Packed:
    """Allocate the packed weights of `num_experts` experts, each shaped like `gate_up` and `down`.

    See `quire.kernels.experts`.
    """
    first, second = (torch.empty((num_experts, *one.shape), dtype=one.dtype, device=device) for one in (gate_up, down))
    return first, second


def put(packed: Packed, place: int, gate_up: Tensor, down: Tensor) -> None:
    """Pack the weights of an expert into `packed` at the index `place`. See `quire.kernels.experts`."""
    packed[0][place].copy_(gate_up, non_blocking=True)
    packed[1][place].copy_(down, non_blocking=True)


def destination(packed: Packed) -> Packed:
    """Return the memory of all experts' weights (gate_up, down) for a loader to fill. See `quire.kernels.experts`."""
    return packed
