"""Tries of a request on a backend, until the first byte of an answer; for a hedge two of them at once.

    begin --head, first byte--> begun: its owner passes the answer on, and closes it
          --anything else-----> a fault; it is closed

Until then the client has got nothing, so that another backend may take the request.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from quire.router.asked import Asked, WholeAnswer
from quire.router.backends import Backend, Load
from quire.router.upstream import Upstream, UpstreamError, read_all

ELSEWHERE = (429, 503)  # statuses of a backend that is full, loading or ending: another one may take the request
BROKEN = (500, 502, 504)  # statuses of a backend that fails; the client gets them
LATE, OWN_LIMIT = 408, b"x-request-timeout"  # no step began it; header of a client that sets a limit of its own
UNTOUCHED = ("connect", "files", *map(str, ELSEWHERE))  # faults after which a backend has certainly done nothing
COSTLY = ("timeout", *map(str, ELSEWHERE))  # faults of backends that are there: a retry adds to the load


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A backend did not begin an answer. `reason`: a word for the metrics; `answer`: what it said, if anything."""

    reason: str
    message: str
    answer: WholeAnswer | None = None


class Attempt:
    """A request on a backend. After `begin` returned None: `connection`, and the `first` piece of the body."""

    def __init__(self, backend: Backend, load: Load, timeout: float) -> None:
        """timeout: seconds until the first byte"""
        self.backend, self._load, self._timeout = backend, load, timeout
        self.connection: Upstream | None = None
        self.first = b""
        self._closed = self._judged = False
        self._trial = backend.breaker.begin()
        load.__enter__()

    async def begin(self, asked: Asked, data: bytes) -> Fault | None:
        """Send the request with the body `data`. Return a fault if no answer has begun."""
        try:
            fault = await self._first_byte(asked, data)
        except BaseException:
            self.close()
            raise
        if fault is not None:
            self.close()
        else:
            self._load.begun()
        return fault

    def failed(self, error: UpstreamError) -> None:
        """Record that the connection failed."""
        self.backend.failed(error)
        self._judge(None if error.reason == "files" else False)

    def close(self) -> None:
        """End the use of the connection and of the backend. Idempotent."""
        if not self._closed:
            self._closed = True
            self._judge(None)
            self._load.__exit__()
            if self.connection is not None:
                self.backend.pool.give_back(self.connection)

    async def _first_byte(self, asked: Asked, data: bytes) -> Fault | None:
        try:
            async with asyncio.timeout(self._timeout):
                self.connection = await self.backend.pool.ask(asked.method, asked.target, asked.headers, data)
                self.first = await self.connection.read()
                if (status := self.connection.status) not in ELSEWHERE:
                    self._judge(_verdict(status, asked))
                    return None
                rest = await read_all(self.connection)
        except TimeoutError:
            self.backend.doubted.set()
            self._judge(False)
            return Fault(reason="timeout", message=f"the answer did not begin within {self._timeout:g} s")
        except UpstreamError as error:
            self.failed(error)
            return Fault(reason=error.reason, message=str(error))
        if status == 503:
            self.backend.doubted.set()  # it may have begun to drain
        answer = WholeAnswer(status=status, headers=self.connection.headers, body=self.first + rest)
        return Fault(reason=str(status), message="all are full or ending", answer=answer)

    def _judge(self, ok: bool | None) -> None:
        """Tell the circuit once how the request went; and again when an answer that began well broke off."""
        if ok is False or not self._judged:
            self.backend.judged(self._trial, ok)
            self._judged, self._trial = True, False


def _verdict(status: int, asked: Asked) -> bool | None:
    """Return what an answer's status says to the circuit; see `Breaker.end`."""
    if status == LATE and any(name == OWN_LIMIT for name, _ in asked.headers):
        return None
    return status not in (*BROKEN, LATE)


async def race(
    first: Attempt, second: Callable[[], Attempt | None], after: float, asked: Asked
) -> tuple[Attempt | None, Fault | None]:
    """Begin a second try if the first one has not begun to answer after some seconds. Return the one that answers.

    The other one is closed, so that its backend stops. If both fail: the last fault.
    """
    trying = {asyncio.create_task(first.begin(asked, asked.data)): first}
    fault: Fault | None = None
    try:
        done, _ = await asyncio.wait(trying, timeout=after)
        if not done and (other := second()) is not None:
            trying[asyncio.create_task(other.begin(asked, asked.body.data))] = other
        while trying:
            done, _ = await asyncio.wait(trying, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                fault = task.result()
                attempt = trying.pop(task)
                if fault is None:
                    return attempt, None
        return None, fault
    finally:
        for task in trying:
            task.cancel()
        await asyncio.gather(*trying, return_exceptions=True)
        for attempt in trying.values():
            attempt.close()
