"""The slots of a layer's experts on all ranks, when hot experts have copies (EPLB; see `engine/eplb.py`).

`engine.eplb.choose_copy` says which copy computes a row; this is the same choice on the device. A map is replaced in
place, between two steps, so that recorded launches read the new one.
"""

import torch
from torch import Tensor

from quire.config.balancing import GOLDEN, SPREAD

LOW = 0xFFFFFFFF


class ExpertSlots:
    """Device map of a layer from experts to slots, and the count of tokens for each expert.

    slots    [E, most copies] int32: slots of each expert, then -1
    counts   [E] int32: copies of each expert
    first, each   slots of this rank: first, first + 1, ... first + each - 1
    load     [E] int64: tokens that chose each expert since the last reset
    """

    def __init__(self, slots: Tensor, counts: Tensor, first: int, each: int) -> None:
        self.slots, self.counts, self._first, self._each = slots, counts, first, each
        self.load = torch.zeros(len(counts), dtype=torch.int64, device=counts.device)

    def replace(self, slots: Tensor, counts: Tensor) -> None:
        """Take a new map, in the order of the device's work."""
        self.slots.copy_(slots)
        self.counts.copy_(counts)

    def count(self, ids: Tensor, rows: Tensor | None = None) -> None:
        """Count the experts `ids` [T, k] of tokens.

        rows   [1] number of tokens, without the padding that follows; None: there is none
        """
        one = torch.ones_like(ids, dtype=torch.int64)
        if rows is not None:
            one *= (torch.arange(len(ids), device=ids.device) < rows)[:, None]
        self.load.index_add_(0, ids.flatten(), one.flatten())

    def places(self, ids: Tensor) -> Tensor:
        """Return places on this rank [T, k] int32 of the experts `ids` [T, k]; -1: another rank computes the row.

        All ranks call this with the same rows in the same order: the number of a row chooses the copy.
        """
        rows = torch.arange(len(ids), device=ids.device, dtype=torch.int64)[:, None]
        known = ids.clamp(min=0).long()
        counts = self.counts[known].long()
        copy = ((rows * GOLDEN + known * SPREAD) & LOW) * counts >> 32
        place = self.slots[known, copy] - self._first
        return place.masked_fill((place < 0) | (place >= self._each) | (ids < 0), -1).to(torch.int32)


def initial_slots(num_experts: int, redundant: int) -> tuple[Tensor, Tensor]:
    """Return (slots, counts) of `ExpertSlots` before any load is known: slot p has expert p modulo `num_experts`."""
    slots = torch.full((num_experts, redundant + 1), -1, dtype=torch.int32)
    counts = torch.zeros(num_experts, dtype=torch.int32)
    for slot in range(num_experts + redundant):
        expert = slot % num_experts
        slots[expert, counts[expert]] = slot
        counts[expert] += 1
    return slots, counts
