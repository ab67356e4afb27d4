"""The slots of a layer's experts on all ranks, when hot experts have copies (EPLB; see `engine/eplb.py`).

A map is replaced in place, between two steps, so that recorded launches read the new one.
"""

import torch
from torch import Tensor

from quire.config.balancing import GOLDEN, SPREAD
from quire.kernels import triton_runtime

LOW = 0xFFFFFFFF
REPLICA_ROWS = 100_003  # between the numbers of the first rows of two replicas; a prime


class ExpertSlots:
    """Device map of a layer from experts to slots, and the count of tokens for each expert.

    slots    [E, most copies] int32: slots of each expert, then -1
    counts   [E] int32: copies of each expert
    first_row   number of this replica's first row: replicas begin at different copies
    load     [E] int64: tokens that chose each expert since the last reset
    """

    def __init__(self, slots: Tensor, counts: Tensor, first_row: int = 0) -> None:
        self.slots, self.counts, self._first_row = slots, counts, first_row
        self.load = torch.zeros(len(counts), dtype=torch.int64, device=counts.device)

    def replace(self, slots: Tensor, counts: Tensor) -> None:
        """Take a new map, in the order of the device's work."""
        self.slots.copy_(slots)
        self.counts.copy_(counts)

    def take(self, ids: Tensor) -> Tensor:
        """Count the experts `ids` [T, k] of tokens, and return their slots; see `count` and `choose`."""
        if ids.is_cuda and not triton_runtime.missing():
            from quire.kernels.expert_copies import triton_slots

            return triton_slots.take(ids, self.slots, self.counts, self.load, self._first_row)
        self.count(ids)
        return self.choose(ids)

    def count(self, ids: Tensor) -> None:
        """Count the experts `ids` [T, k] of tokens; -1: none."""
        self.load.index_add_(0, ids.flatten().clamp(min=0), (ids.flatten() >= 0).long())

    def choose(self, ids: Tensor) -> Tensor:
        """Return the slot [T, k] int32 that computes each of the experts `ids` [T, k] of a replica's rows; of -1: -1.

        The ranks of a replica have the same rows and choose the same slots; no other rank chooses for them. Multiples
        of the golden ratio, modulo 1, are spread evenly over [0, 1) for any run of consecutive rows, so the rows of
        every rank are divided among all copies. Experts begin at different places.
        """
        rows = self._first_row + torch.arange(len(ids), device=ids.device, dtype=torch.int64)[:, None]
        experts = ids.long().clamp(min=0)
        copy = ((rows * GOLDEN + experts * SPREAD) & LOW) * self.counts[experts] >> 32
        return torch.where(ids < 0, ids, self.slots[experts, copy])


def initial_slots(num_experts: int, redundant: int, turns: int = 1) -> tuple[Tensor, Tensor]:
    """Return (slots, counts) of `ExpertSlots` before any load is known: slot p has expert p modulo `num_experts`.

    turns   number of ranks to which these go in turn; 1: each rank has neighbours
    """
    held = torch.arange(num_experts + redundant).view(-1, turns).T.flatten() % num_experts
    slots = torch.full((num_experts, redundant + 1), -1, dtype=torch.int32)
    counts = torch.zeros(num_experts, dtype=torch.int32)
    for slot, expert in enumerate(held.tolist()):
        slots[expert, counts[expert]] = slot
        counts[expert] += 1
    return slots, counts
