"""The slice of the vocabulary that a rank's embedding and head hold."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.distributed import Group


@dataclass(frozen=True)
class VocabularySlice:
    """This rank's slice of a vocabulary that the ranks of `group` divide: `counts[group.rank]` ids from `first` on.

    counts   number of ids of each rank, in the order of ranks
    """

    group: Group
    first: int
    counts: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of ids of this rank."""
        return self.counts[self.group.rank]

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (rows of this rank's slice [T], mask [T] bool). An id of another rank has row 0 and mask False."""
        rows = ids - self.first
        ours = (rows >= 0) & (rows < self.count)
        return rows.masked_fill(~ours, 0), ours

    def whole(self, logits: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary [R, V], on every rank, from this rank's [R, count]."""
        widest = max(self.counts)
        if logits.shape[1] < widest:
            logits = torch.nn.functional.pad(logits, (0, widest - logits.shape[1]))
        parts = self.group.all_gather(logits)
        return torch.cat([part[:, :count] for part, count in zip(parts, self.counts, strict=True)], dim=1)
