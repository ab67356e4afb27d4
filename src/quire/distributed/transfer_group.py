"""A group of two or more processes in which one sends weights to engines, over torch.distributed's gloo.

A trainer is rank 0, and an engine takes one place, whatever its number of ranks:

    group = TransferGroup("10.0.0.1", 29500, rank=0, size=2)    # in the trainer, while the engine is told to join
    group.send(tensor)                                          # in the order of `names` of /update_weights
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

SECONDS = 300.0
PREFIX = "quire-weights"


class TransferGroup:
    """A process of the group.

    address, port   of rank 0
    seconds         longest wait for the other processes, at the start and for a tensor
    """

    def __init__(self, address: str, port: int, *, rank: int, size: int, seconds: float = SECONDS) -> None:
        limit = timedelta(seconds=seconds)
        self._store = dist.TCPStore(address, port, size, is_master=rank == 0, timeout=limit)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore(PREFIX, self._store), rank, size, limit)

    def send(self, tensor: Tensor) -> None:
        """Send a tensor to all others. For rank 0."""
        self._broadcast(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the next tensor that rank 0 sends. Raises RuntimeError when none comes in time."""
        tensor = torch.empty(shape, dtype=dtype)
        self._broadcast(tensor.view(-1).view(torch.uint8))
        return tensor

    def _broadcast(self, data: Tensor) -> None:
        if data.numel():
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self._group.broadcast([data], options).wait()
