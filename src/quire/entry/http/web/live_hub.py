"""The watchers of the live view in an HTTP process: frames of the core go to all of them, and wait for none.

One frame is asked for at a time, and only while somebody watches. A watcher that reads slowly loses the oldest frames
that wait for it. Knows nothing of HTTP.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from quire.contracts.errors import EngineClosed, QueueFull
from quire.contracts.live import LiveFrame
from quire.entry.http.web.timelines import Timelines

MOST_WATCHERS = 64
MOST_WAITING = 8  # frames for a watcher
PERCENTILES = (50, 90, 99)
ENDS = "the server is shutting down."
LATENCY_SECONDS = 1.0  # between two looks at the records of requests
LATENCY_WINDOW = 300.0  # seconds for which a request that ended counts

Records = Callable[[], Iterable[Mapping[str, Any]]]


def event(name: str, data: bytes) -> bytes:
    """Return a server-sent event with a name. data: JSON without line breaks."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class LiveReader:
    """A watcher: the events that wait for it. tenant: of the caller; it sees ids of its own requests only."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self._frames = deque[bytes](maxlen=MOST_WAITING)
        self._lost = 0
        self._end: bytes | None = None
        self._come = asyncio.Event()

    def put(self, frame: bytes) -> None:
        """Queue a frame. The oldest one is dropped, and counted, when `MOST_WAITING` wait."""
        self._lost += len(self._frames) == MOST_WAITING
        self._frames.append(frame)
        self._come.set()

    def end(self, reason: str) -> None:
        """Let the stream end after the frames that wait."""
        self._end = event("end", msgspec.json.encode({"reason": reason}))
        self._come.set()

    async def next(self) -> tuple[bytes, bool]:
        """Wait for events. Return those that wait, and True when they are the last ones."""
        await self._come.wait()
        self._come.clear()
        pieces = [event("lost", msgspec.json.encode({"frames": self._lost}))] if self._lost else []
        pieces += self._frames
        self._frames.clear()
        self._lost = 0
        if self._end is not None:
            return b"".join([*pieces, self._end]), True
        return b"".join(pieces), False


class LiveHub:
    """The watchers of an engine, and what they need beside frames.

    ask        asks the core for the next frame
    records    returns the records of live and ended requests (`request_record`), of all tenants
    exchanges  bytes of messages between ranks for each computed token, by group of ranks
    """

    def __init__(self, ask: Callable[[], None], records: Records, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._records, self._clock = ask, records, clock
        self._readers = set[LiveReader]()
        self._closed = ""
        self._limit: float | None = None  # of `clock`: when running requests are ended; None: the server does not drain
        self._latency: tuple[float, dict[str, Any]] = (float("-inf"), {})
        self.exchanges: dict[str, int] = {}
        self.timelines = Timelines()

    def open(self, tenant: str) -> LiveReader:
        """Return a new watcher; `close` ends it. Raises `QueueFull` when there are too many, `EngineClosed`."""
        if self._closed:
            raise EngineClosed(self._closed)
        if len(self._readers) >= MOST_WATCHERS:
            raise QueueFull(f"{MOST_WATCHERS} watch already: close another one, and try again.")
        reader = LiveReader(tenant)
        self._readers.add(reader)
        self._ask()
        return reader

    def close(self, reader: LiveReader) -> None:
        """Forget a watcher; idempotent. After the last one, no frame is asked for."""
        self._readers.discard(reader)

    def drain(self, seconds: float) -> None:
        """Tell watchers that the server drains, and end their streams when no request is left.
        seconds: time that running requests have"""
        self._limit = self._clock() + seconds

    def go_on(self) -> None:
        """Ask another core for the next frame, in the place of one that has died."""
        if self._readers:
            self._ask()

    def end(self, reason: str) -> None:
        """End all streams, and take no watcher any more; idempotent."""
        self._closed = self._closed or reason
        for reader in self._readers:
            reader.end(reason)

    def take(self, frame: LiveFrame) -> None:
        """Give a frame of the core to every watcher, and ask for the next one."""
        self.timelines.take(frame)
        if not self._readers or self._closed:
            return
        self._ask()
        made: dict[str, bytes] = {}
        more = {"exchanged": self._exchanged(frame), "latency": self._latencies(), "draining": self._draining(frame)}
        for reader in self._readers:
            if (data := made.get(reader.tenant)) is None:
                made[reader.tenant] = data = event("frame", shown(frame, reader.tenant, more))
            reader.put(data)
        if more["draining"] is not None and not more["draining"]["requests"]:
            self.end(ENDS)

    def _draining(self, frame: LiveFrame) -> dict[str, Any] | None:
        """Return the requests and the seconds that are left to a server that drains; None: it does not."""
        if self._limit is None:
            return None
        queues = [engine.queue for engine in frame.engines]
        left = sum(queue.running + queue.waiting + sum(queue.blocked.values()) for queue in queues)
        return {"requests": left, "seconds": max(0.0, self._limit - self._clock())}

    def _exchanged(self, frame: LiveFrame) -> dict[str, int]:
        tokens = sum(engine.sums.tokens for engine in frame.engines)
        return {group: tokens * each for group, each in self.exchanges.items()}

    def _latencies(self) -> dict[str, Any]:
        """Return the percentiles of requests' times. They are renewed once a second."""
        now = self._clock()
        if now - self._latency[0] >= LATENCY_SECONDS:
            self._latency = (now, latencies(self._records(), time.time()))
        return self._latency[1]


def shown(frame: LiveFrame, tenant: str, more: dict[str, Any]) -> bytes:
    """Return a frame as JSON for a tenant, with further fields. It has the ids of the tenant's requests only."""
    owners, engines = frame.tenants, frame.engines
    if tenant or owners:
        engines = [
            msgspec.structs.replace(
                engine,
                requests=msgspec.structs.replace(
                    engine.requests,
                    id=[
                        name if owners.get(handle, "") == tenant else None
                        for handle, name in zip(engine.requests.handle, engine.requests.id, strict=True)
                    ],
                ),
            )
            for engine in frame.engines
        ]
    fields = {name: getattr(frame, name) for name in ("frame", "at", "seconds", "cost_s")}
    return msgspec.json.encode(fields | {"engines": engines, "experts": frame.experts} | more)


def latencies(records: Iterable[Mapping[str, Any]], now: float) -> dict[str, Any]:
    """Return p50, p90 and p99 of the times of requests; None where no request has the value yet.

    Requests that ended more than `LATENCY_WINDOW` seconds before `now` (since 1970) are left out. A request that did
    not start counts in `queue_s` with the time that it has waited.
    """
    times: dict[str, list[float]] = {"ttft_s": [], "tpot_s": [], "queue_s": [], "e2e_s": []}
    count, oldest = 0, None
    for one in records:
        queue, prefill, decode, whole = one["queue_s"], one["prefill_s"], one["decode_s"], one["e2e_s"]
        ended = one["state"] not in ("waiting", "running")
        if ended and one["arrived"] + whole < now - LATENCY_WINDOW:
            continue
        count += 1
        times["queue_s"].append(whole if queue is None else queue)
        if one["state"] == "waiting":
            oldest = max(oldest or 0.0, whole)
        if prefill is not None:
            times["ttft_s"].append(queue + prefill)
        if decode is not None and one["num_output"] > 1:
            times["tpot_s"].append(decode / (one["num_output"] - 1))
        if ended:
            times["e2e_s"].append(whole)
    found = {name: np.percentile(values, PERCENTILES).tolist() if values else None for name, values in times.items()}
    counts = {name: len(values) for name, values in times.items()}
    return {"requests": count, "counts": counts, "window_s": LATENCY_WINDOW, "oldest_wait_s": oldest} | found
