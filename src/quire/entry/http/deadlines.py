"""Time limits of streams until a step schedules them, and until their first token. Knows nothing of HTTP and the core.

The limit of a whole request is the core's, which ends the request itself.
"""

import asyncio
import math
import time
from collections.abc import Callable

from quire.config.serve import DeadlineConfig
from quire.contracts.errors import RequestError, RequestFailed
from quire.entry.http.request_stream import RequestStream, not_started

QUEUE, FIRST_TOKEN = "queue", "first_token"
Line = dict[RequestStream, float]  # stream -> its deadline; the same limit for all, so in the order of deadlines


def too_late(request_id: str, kind: str, seconds: float) -> RequestError:
    """Return the error of a request that waited so many seconds for its start or its first token."""
    if kind == QUEUE:
        return not_started(request_id, seconds)
    words = (
        f"request {request_id} waited {seconds:g} s and had no first token: try again later, or send a shorter prompt."
    )
    return RequestFailed(words, code=late_cause(kind))


def late_cause(kind: str) -> str:
    """Return the word in metrics and logs for streams that a limit has ended."""
    return f"{kind}_timeout"


class Deadlines:
    """The streams that wait, in a line for each kind and number of seconds, and one timer for all.

    expire   called with a stream whose time is over, the kind of the limit, and its seconds; it drops the stream
    """

    def __init__(self, expire: Callable[[RequestStream, str, float], None]) -> None:
        self._expire = expire
        self._lines: dict[tuple[str, float], Line] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # monotonic time of the timer

    def begin(self, stream: RequestStream, limits: DeadlineConfig) -> None:
        """Begin to watch a stream that is sent to the core."""
        now = time.monotonic()
        for kind, seconds in ((QUEUE, limits.queue_timeout), (FIRST_TOKEN, limits.first_token_timeout)):
            if seconds is not None and seconds < math.inf:
                self._lines.setdefault((kind, seconds), {})[stream] = now + seconds
                if self._timer is None or now + seconds < self._due:
                    self._set_timer()

    def end(self, stream: RequestStream, kind: str = "") -> None:
        """Watch a stream no longer; with `kind`: this limit of it, which it has kept."""
        for line, streams in self._lines.items():
            if kind in ("", line[0]):
                streams.pop(stream, None)

    def close(self) -> None:
        """Watch nothing any more."""
        self._lines.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        """Set the timer for the deadline that comes first, if there is one."""
        self._lines = {line: streams for line, streams in self._lines.items() if streams}
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines:
            self._due = min(next(iter(streams.values())) for streams in self._lines.values())
            delay = max(0.0, self._due - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        for (kind, seconds), streams in list(self._lines.items()):
            for stream in [stream for stream, deadline in streams.items() if deadline <= now]:
                self._expire(stream, kind, seconds)
        self._set_timer()
