"""Counters between two scrapes of the metrics: lists and dicts, cheap enough to update for every token.

Knows nothing of names, labels and the exposition format.
"""

from bisect import bisect_left
from collections.abc import Iterable

OTHER = "other"


def one_two_five(largest: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `largest`: bounds for lengths in tokens."""
    powers = (10**exponent for exponent in range(len(str(largest))))
    return tuple(float(m * power) for power in powers for m in (1, 2, 5) if m * power <= largest)


class Histogram:
    """A histogram for metrics: the number of observations per bucket, and the sum of all observed values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Record an observation of `value`, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def add(self, counts: Iterable[int], total: float) -> None:
        """Add the observations of another histogram with the same bounds, once it has the same."""
        counts = list(counts)
        if len(counts) == len(self.counts):
            self.counts = [own + other for own, other in zip(self.counts, counts, strict=True)]
            self.total += total

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, observations at or below it) pairs; the last bound is +Inf."""
        names = [*map(repr, self.bounds), "+Inf"]
        below, pairs = 0, []
        for name, count in zip(names, self.counts, strict=True):
            below += count
            pairs.append((name, float(below)))
        return pairs


class Tally:
    """Counts by label values. After `limit` different values, new values are counted as "other"."""

    __slots__ = ("counts", "_limit")

    def __init__(self, *known: tuple[str, ...], limit: int = 64) -> None:
        self.counts: dict[tuple[str, ...], float] = dict.fromkeys(known, 0.0)
        self._limit = limit

    def add(self, *labels: str, count: float = 1) -> None:
        """Add `count` to the count of these label values."""
        if labels not in self.counts and len(self.counts) >= self._limit:
            labels = (OTHER,) * len(labels)
        self.counts[labels] = self.counts.get(labels, 0.0) + count
