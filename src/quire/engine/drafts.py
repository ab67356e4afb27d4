"""Drafts per request in the next step (k), chosen by load, and the count of accepted ones."""

from bisect import bisect_right

import numpy as np

from quire.contracts.step import I32


class DraftLength:
    """Chooses how many drafts each decode of a step verifies at most.

    most       maximum number of drafts (k); 0: no speculation
    by_batch   (decoding requests, k), ascending: from so many requests on, at most k drafts; () : always `most`
    totals     as `StepStats.drafts`
    """

    def __init__(self, most: int = 0, by_batch: tuple[tuple[int, int], ...] = ()) -> None:
        self.most = most
        self._sizes, self._lengths = [size for size, _ in by_batch], [k for _, k in by_batch]

        self.totals: tuple[int, ...] = (0,) * (2 + most) if most else ()

    def count(self, drafted: I32, accepted: I32) -> I32:
        """Count the drafts of a step. Return them [N, 1 + most]: made, accepted as first of a run, as second, ...

        drafted, accepted   [N] drafts that were made for each decode, and valid tokens of its run
        """
        found = np.empty((len(drafted), 1 + self.most), np.int32)
        found[:, 0] = drafted
        found[:, 1:] = np.arange(1, 1 + self.most) < accepted[:, None]
        new = (int(np.count_nonzero(drafted)), *found.sum(0).tolist())
        self.totals = tuple(a + b for a, b in zip(self.totals, new, strict=True))
        return found

    def choose(self, num_decodes: int) -> int:
        """Return the maximum number of drafts of each decode, in a step with `num_decodes` decodes."""
        place = bisect_right(self._sizes, num_decodes) - 1
        return self._lengths[place] if place >= 0 else self.most
