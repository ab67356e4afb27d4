"""Drafts per request in the next step (k), chosen by load."""

from bisect import bisect_right


class DraftLength:
    """Chooses how many drafts each decode of a step verifies at most.

    most       maximum number of drafts (k); 0: no speculation
    by_batch   (decoding requests, k), ascending: from so many requests on, at most k drafts; () : always `most`
    """

    def __init__(self, most: int = 0, by_batch: tuple[tuple[int, int], ...] = ()) -> None:
        self.most = most
        self._sizes, self._lengths = [size for size, _ in by_batch], [k for _, k in by_batch]

    def choose(self, num_decodes: int) -> int:
        """Return the maximum number of drafts of each decode, in a step with `num_decodes` decodes."""
        place = bisect_right(self._sizes, num_decodes) - 1
        return self._lengths[place] if place >= 0 else self.most
