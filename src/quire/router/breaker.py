"""The circuit breaker of a backend: it takes no requests for a while after it has failed several in a row.

    closed --`failures` requests in a row fail--> open --`seconds` pass--> half open --the trial succeeds--> closed
                                                   ^                          |
                                                   +-----the trial fails------+   twice the wait, up to `MOST_TIMES`

A health check asks the HTTP process of a backend; its engine may be dead behind it. The breaker sees the requests.
A clock is handed in. Knows nothing of connections.
"""

import time
from collections.abc import Callable
from enum import Enum

MOST_TIMES = 8  # longest wait, in units of the first one


class Circuit(Enum):
    """State of a circuit. The values are those of the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """The circuit of one backend.

    failures   requests in a row that must fail; 0: the circuit never opens
    seconds    time from opening to the first trial
    may_open   False while too many other circuits are open
    opened     number of times that it has opened
    """

    def __init__(
        self,
        failures: int,
        seconds: float,
        may_open: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit, self._first, self.may_open, self._clock = failures, seconds, may_open, clock
        self.opened = 0
        self.close()

    @property
    def state(self) -> Circuit:
        """The state of now."""
        if self._until is None:
            return Circuit.CLOSED
        return Circuit.OPEN if self._clock() < self._until else Circuit.HALF_OPEN

    @property
    def allows(self) -> bool:
        """True when a request may go to the backend: always while closed, one at a time while half open."""
        return self._until is None or (not self._trial and self._clock() >= self._until)

    @property
    def wait(self) -> float:
        """Seconds until a trial may go there; 0: now."""
        return 0.0 if self._until is None else max(0.0, self._until - self._clock())

    def close(self) -> None:
        """Forget all failures."""
        self._until: float | None = None  # time from which on a trial may go there; None: closed
        self._seconds, self._failed, self._trial = self._first, 0, False

    def begin(self) -> bool:
        """Count a request that goes there. Return True if it is the trial, whose end must be told."""
        self._trial = self._until is not None
        return self._trial

    def end(self, trial: bool, ok: bool | None) -> None:
        """Take the end of a request. ok: None for one that proves nothing, such as one whose client has left."""
        if trial:
            self._trial = False
            if ok is False:
                self._seconds = min(2 * self._seconds, MOST_TIMES * self._first)
                self._open()
            elif ok:
                self.close()
        elif self._until is None and ok is not None:
            self._failed = 0 if ok else self._failed + 1
            if self._failed >= self._limit > 0 and self.may_open():
                self._open()

    def _open(self) -> None:
        self._until = self._clock() + self._seconds
        self.opened += 1
