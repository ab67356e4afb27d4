"""What metrics are counted in between two scrapes: plain lists and dicts, cheap enough for every token.

Knows nothing of names, labels and the exposition format. Bucket bounds follow the peer's, so that its dashboards and
alert rules fit; where those begin too coarsely for a fast engine, finer bounds stand before them.
"""

from bisect import bisect_left
from collections.abc import Sequence

PHASE_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
                 960.0, 1920.0, 7680.0)
REQUEST_SECONDS = (0.01, 0.03, 0.1, *PHASE_SECONDS)
FIRST_TOKEN_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
                       20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
                 7.5, 10.0, 20.0, 40.0, 80.0)
STEP_SECONDS = (0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
COMPLETIONS = (1.0, 2.0, 5.0, 10.0, 20.0)
LAG_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
OTHER = "other"


def one_two_five(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `largest`: bounds for lengths in tokens."""
    powers = (10**exponent for exponent in range(len(str(largest))))
    return tuple(float(m * power) for power in powers for m in (1, 2, 5) if m * power <= largest)


class Histogram:
    """How many observations fell under each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value`, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, observations at or below it) pairs; the last bound is +Inf."""
        names = [*map(repr, self.bounds), "+Inf"]
        below, pairs = 0, []
        for name, count in zip(names, self.counts, strict=True):
            below += count
            pairs.append((name, float(below)))
        return pairs


class Tally:
    """Counts by label values. Beyond `limit` different ones the rest is counted as "other"."""

    __slots__ = ("counts", "_limit")

    def __init__(self, *known: tuple[str, ...], limit: int = 64) -> None:
        self.counts: dict[tuple[str, ...], float] = dict.fromkeys(known, 0.0)
        self._limit = limit

    def add(self, *labels: str, count: float = 1) -> None:
        """Count one more, or `count`."""
        if labels not in self.counts and len(self.counts) >= self._limit:
            labels = (OTHER,) * len(labels)
        self.counts[labels] = self.counts.get(labels, 0.0) + count
