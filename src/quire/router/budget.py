"""The budget of retries and hedges: a share of the requests, so that full backends do not get them several times over.

Each request adds `share` to the balance, each second adds `PER_SECOND`; a retry takes 1. Knows nothing of requests.
"""

import time
from collections.abc import Callable

PER_SECOND = 1.0  # so that a router with few requests may retry, too
FIRST, MOST = 10.0, 100.0  # balance at the start, and the largest


class RetryBudget:
    """The balance of a router. `denied`: retries that it did not allow."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._clock = share, clock
        self._balance, self._at = FIRST, clock()
        self.denied = 0

    def earn(self) -> None:
        """Count a request."""
        self._add(self._share)

    def take(self) -> bool:
        """Take a retry from the balance. Return False if there is none; with share 0 there never is."""
        now = self._clock()
        self._add((now - self._at) * PER_SECOND)
        self._at = now
        if self._share and self._balance >= 1:
            self._balance -= 1
            return True
        self.denied += 1
        return False

    def _add(self, amount: float) -> None:
        self._balance = min(MOST, self._balance + amount)
